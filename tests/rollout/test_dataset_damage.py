"""Files whose bytes were changed or cut off: it is always noticed, nothing is deleted, and what is whole is saved."""

from __future__ import annotations

import os
import random
import shutil
import warnings

import pyarrow as pa
import pytest

from envfleet.cli.main import main
from envfleet.errors import DamagedWarning, DatasetDamaged, DatasetError, UncheckedWarning
from envfleet.rollout import DatasetWriter, Rollout, Rollouts, iter_rollouts
from envfleet.rollout.datasets.episode_codec import Codec
from envfleet.rollout.datasets.parquet import read_run
from tests.support.dataset_files import episode, everything, killed, numbers_on_disk, resumed

RUN = {"env": "Maze", "seed": 3}
COUNT = 9
COUNTS = {"flips": 500, "cuts": 200}


def dataset(place, kind):
    """A dataset and the file of it that is to be damaged."""
    if kind == "tail":
        return killed(place, COUNT, run=RUN)
    if kind == "early":
        writer = DatasetWriter(place, run=RUN)
        writer.add(Rollout(observations=[], actions=[], rewards=[], terminated=[], truncated=[], episode=0))
        writer._lock.close()
        return next(place.glob("_early-*"))
    killed(place, COUNT, run=RUN)
    resumed(place)[0].close()
    return place / {"shard": "shard-00000.parquet", "run": "_run.json"}[kind]


def damages(whole, counts, seed=0):
    """Every kind of change: one bit, several, a block of zeros, and cuts at any byte."""
    rng = random.Random(seed)
    for trial in range(counts["flips"]):
        data = bytearray(whole)
        if trial % 10 == 9:  # a sector that was never written
            at = rng.randrange(len(data))
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        for _ in range(1 if trial % 10 < 8 else 3):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(data)
    for _ in range(counts["cuts"]):
        yield whole[: rng.randrange(len(whole))]


def outcome(place, kind):
    """`noticed`, or everything that was read."""
    try:
        if kind == "run":
            return read_run(place)
        return [everything(rollout) if kind != "early" else rollout.episode for rollout in iter_rollouts(place)]
    except DatasetDamaged as damaged:
        assert damaged.path.parent == place and str(damaged.path) in str(damaged)
        return "noticed"


@pytest.mark.parametrize("kind", ["tail", "shard", "early", "run"])
def test_no_change_goes_unnoticed(tmp_path, kind):
    path = dataset(tmp_path, kind)
    whole, right = path.read_bytes(), outcome(tmp_path, kind)
    assert right and right != "noticed"
    noticed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a changed file must not pass for one from before there were checksums
        for data in damages(whole, COUNTS):
            path.write_bytes(data)
            found = outcome(tmp_path, kind)
            noticed += found == "noticed"
            assert found in ("noticed", right)
    assert noticed >= 0.9 * sum(COUNTS.values())


@pytest.mark.parametrize("kind", ["tail", "shard", "early"])
def test_resume_deletes_nothing_it_cannot_read(tmp_path, kind):
    path = dataset(tmp_path / "whole", kind)
    whole = path.read_bytes()
    saved = []
    for trial, data in enumerate(damages(whole, {"flips": 40, "cuts": 10}, seed=1)):
        place = tmp_path / str(trial)
        shutil.copytree(tmp_path / "whole", place)
        (place / path.name).write_bytes(data)
        writer, told = resumed(place, run=RUN)
        with writer:
            there = set(writer.ids)
        assert [r.episode for r in iter_rollouts(place)] == sorted(there)
        if kind != "early":
            assert set(numbers_on_disk(place)) == there  # what was saved is what was written
        if there != ({0} if kind == "early" else set(range(COUNT))):
            assert len(told) == 1
        if told:
            (kept,) = place.glob("*.damaged-1")
            assert kept.read_bytes() == data and kept.name in told[0] and kept.name.startswith("_")
        if trial < 40 and trial % 10 < 8:
            saved.append(len(there))
        shutil.rmtree(place)
    if kind == "tail":  # one changed bit costs one episode at most
        assert min(saved) >= COUNT - 1
    if kind == "shard":  # a row group at most: here they are one, so all or none
        assert set(saved) == {0, COUNT}


def test_what_lies_behind_a_damaged_record_is_saved(tmp_path):
    tail = killed(tmp_path, COUNT)
    data = bytearray(tail.read_bytes())
    place = data.rfind(b"\xf5efrec\xfa\n", 0, len(data) // 2)
    data[place] ^= 1  # the mark of a record in the middle
    tail.write_bytes(data)
    with pytest.raises(DatasetDamaged, match=r"_tail-00000\.records is damaged"):
        list(iter_rollouts(tmp_path))
    writer, (told,) = resumed(tmp_path)
    assert len(writer.ids) == COUNT - 1 and {0, COUNT - 1} <= writer.ids and f"{COUNT - 1} episodes of it were saved" in told
    (lost,) = set(range(COUNT)) - writer.ids
    with writer:
        writer.add(episode(lost))
    assert sorted(numbers_on_disk(tmp_path)) == list(range(COUNT))


def test_row_groups_of_a_damaged_shard_are_saved(tmp_path):
    with DatasetWriter(tmp_path) as writer:
        for number in range(1100):  # more than one row group holds
            writer.add(episode(number, 2))
    shard = tmp_path / "shard-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    writer, (told,) = resumed(tmp_path)
    writer.close()
    assert writer.ids == set(range(1024, 1100)) and "1024 episodes (row group 0) are damaged" in told
    assert numbers_on_disk(tmp_path, 2) == list(range(1024, 1100))


def test_a_damaged_footer_costs_nothing(tmp_path):
    shard = dataset(tmp_path, "shard")
    whole = shard.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    for back in (1, 6, footer // 2, footer - 5):
        data = bytearray(whole)
        data[-back] ^= 1
        shard.write_bytes(data)
        writer, (told,) = resumed(tmp_path)
        writer.close()
        assert f"{COUNT} episodes of it were saved" in told and numbers_on_disk(tmp_path) == list(range(COUNT))
        assert pa.parquet.read_table(tmp_path).num_rows == COUNT  # as others read a directory: without the kept file


def test_a_damaged_shard_is_made_again_from_its_tail(tmp_path):
    tail = killed(tmp_path, COUNT)
    copy = tail.read_bytes()
    resumed(tmp_path)[0].close()
    shard = tmp_path / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    tail.write_bytes(copy)  # killed between writing the shard and removing the tail
    writer, (told,) = resumed(tmp_path)
    writer.close()
    assert "made again from its tail" in told and numbers_on_disk(tmp_path) == list(range(COUNT))


def test_a_damaged_description_is_kept_and_told(tmp_path):
    path = dataset(tmp_path, "run")
    data = path.read_bytes().replace(b"Maze", b"Mazf")
    path.write_bytes(data)
    writer, (told,) = resumed(tmp_path, run=RUN)
    writer.close()
    assert "could not be checked" in told and (tmp_path / "_run.json.damaged-1").read_bytes() == data
    assert read_run(tmp_path) == RUN and writer.ids == set(range(COUNT))
    with pytest.raises(DatasetError, match="seed: 3 then, 4 now"):
        DatasetWriter(tmp_path, run={**RUN, "seed": 4}, resume=True)
    path.unlink()
    writer, (told,) = resumed(tmp_path, run=RUN)
    writer.close()
    assert "_run.json is missing" in told and read_run(tmp_path) == RUN


def test_the_commands_name_a_damaged_file_in_one_line(tmp_path, capsys):
    words = ["collect", "CartPole-v1", "--out", str(tmp_path), "--episodes", "8", "--num-envs", "2", "--backend", "serial"]
    assert main(words) == 0
    before = Rollouts.load(tmp_path).digest()
    shard = tmp_path / "shard-00000.parquet"
    data = bytearray(shard.read_bytes())
    data[500] ^= 4
    shard.write_bytes(data)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--no-plot"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "shard-00000.parquet is damaged" in line
    assert main(words) == 0
    told = capsys.readouterr()
    assert "_shard-00000.parquet.damaged-1" in told.err and len(told.err.strip().splitlines()) == 1
    assert Rollouts.load(tmp_path).digest() == before  # collected again: the same
    assert main(["inspect", str(tmp_path), "--no-plot"]) == 0
    assert "kept as damaged" in capsys.readouterr().out


def test_a_minari_dataset_of_ours_is_checked_too(tmp_path, capsys):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    words = ["collect", "CartPole-v1", "--out", str(tmp_path), "--episodes", "4", "--num-envs", "2", "--backend", "serial"]
    half = tmp_path / "_minari" / "CartPole" / "data"  # what a kill in the middle of converting leaves
    half.mkdir(parents=True)
    (half / "main_data.hdf5").write_bytes(b"half")
    assert main([*words, "--format", "minari"]) == 0
    right = Rollouts.load(tmp_path).digest()
    for path in (tmp_path / "CartPole" / "random-v0" / "data").iterdir():
        whole = path.read_bytes()
        for data in damages(whole, {"flips": 20, "cuts": 5}):
            path.write_bytes(data)
            with pytest.raises(DatasetDamaged, match=path.name):
                Rollouts.load(tmp_path)
        path.write_bytes(whole)
    assert Rollouts.load(tmp_path).digest() == right


# -- datasets from before there were checksums -----------------------------------------------------------------------------


def old_dataset(place, tail_only=False):
    """Written the way the version before did."""
    place.mkdir()
    codec = Codec.of(episode(0))
    batches = [codec.encode(episode(number)) for number in range(6)]
    (place / "_run.json").write_text('{"format": "envfleet-parquet", "version": 1, "run": {"env": "Maze"}}')
    if not tail_only:
        pa.parquet.write_table(pa.Table.from_batches(batches[:4]), place / "shard-00000.parquet", compression="zstd")
    with open(place / "_tail-00001.arrows", "wb", buffering=0) as file:
        stream = pa.ipc.new_stream(file, codec.schema)
        for batch in batches[0 if tail_only else 4 :]:
            stream.write_batch(batch)
        os.fsync(file.fileno())
    return place


def test_old_datasets_are_read_and_continued(tmp_path):
    place = old_dataset(tmp_path / "old")
    with pytest.warns(UncheckedWarning, match="before datasets had checksums"):
        assert numbers_on_disk(place) == list(range(6))
    assert read_run(place) == {"env": "Maze"}
    with DatasetWriter(place, run={"env": "Maze"}, resume=True) as writer:
        assert writer.ids == set(range(6))
        writer.add(episode(6))
    with pytest.warns(UncheckedWarning):
        assert numbers_on_disk(place) == list(range(7))
    Rollouts.load(place).save(tmp_path / "new")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers_on_disk(tmp_path / "new") == list(range(7))


def test_what_cannot_be_read_of_an_old_tail_is_kept(tmp_path):
    place = old_dataset(tmp_path / "old", tail_only=True)
    tail = place / "_tail-00001.arrows"
    data = bytearray(tail.read_bytes())
    stream = pa.ipc.open_stream(reader := pa.BufferReader(bytes(data)))
    stream.read_next_batch()
    data[reader.tell()] ^= 1  # where the second record begins
    tail.write_bytes(data)
    with pytest.warns(DamagedWarning, match=r"_tail-00001\.arrows\.damaged-1"):
        writer = DatasetWriter(place, resume=True)
    writer.close()
    assert writer.ids == {0} and (place / "_tail-00001.arrows.damaged-1").read_bytes() == data
