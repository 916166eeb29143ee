"""What tests share: environments, servers, child processes, fleets to run on. Import as `from tests.support.x import y`."""
