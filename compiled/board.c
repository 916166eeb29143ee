// The parent's board: which turn each slot was given, which is done, and what is beside the rows. See Backend in
// src/envfleet/backends/base.py.
//
// Python may raise an exception of a signal handler between any two of its own instructions, but never inside one call into
// C that does not ask for it. So changes that belong together are made here: a slot is submitted and its turn counted,
// or neither; its info is kept and its turn marked as done, or neither.
#include "envfleet.h"

static uint32_t *numbers_of(PyObject *array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_WRITABLE) < 0) return NULL;
    uint32_t *data = view.buf;
    PyBuffer_Release(&view); // the board keeps the array alive, and it is never resized
    return data;
}

int board_set(Board *board, PyObject *parts) {
    PyObject *given, *done, *info, *final_info, *sided;
    if (!PyArg_ParseTuple(parts, "OOO!O!O!", &given, &done, &PyDict_Type, &info, &PyDict_Type, &final_info, &PyList_Type,
                          &sided))
        return -1;
    uint32_t *given_data = numbers_of(given), *done_data = given_data ? numbers_of(done) : NULL;
    if (!done_data) return -1;
    Py_XSETREF(board->parts, Py_NewRef(parts));
    board->given = given_data;
    board->done = done_data;
    board->info = info;
    board->final_info = final_info;
    board->sided = sided;
    return 0;
}

static PyObject *arena_bytes(const char *row, int final, Py_ssize_t size) {
    const uint32_t *lengths = (const uint32_t *)row;
    Py_ssize_t offset = 8 + (final ? 0 : lengths[1]), length = lengths[final ? 1 : 0];
    return length && offset + length <= size ? PyBytes_FromStringAndSize(row + offset, length) : NULL;
}

static int keep(PyObject *dict, PyObject *slot, PyObject *data) {
    if (!data) {
        if (PyErr_Occurred()) return -1;
        if (PyDict_GET_SIZE(dict) && PyDict_Contains(dict, slot) == 1) return PyDict_DelItem(dict, slot);
        return 0;
    }
    int bad = PyDict_SetItem(dict, slot, data);
    Py_DECREF(data);
    return bad;
}

// A slot is finished in its turn. With something left to Python (SIDE_PYTHON) it goes on the list `sided` as (slot, turn),
// and Python marks it as done; else it is done now. `row`: its part of the arena, NULL where there is none.
// -1 with an exception; then nothing was marked.
int board_finish(Board *board, Py_ssize_t slot, uint32_t turn, int side, const char *row, Py_ssize_t row_bytes) {
    if (side != SIDE_NONE || PyDict_GET_SIZE(board->info) || PyDict_GET_SIZE(board->final_info)) {
        PyObject *number = PyLong_FromSsize_t(slot);
        int bad = !number || keep(board->info, number, side && row ? arena_bytes(row, 0, row_bytes) : NULL) < 0 ||
                  keep(board->final_info, number, side && row ? arena_bytes(row, 1, row_bytes) : NULL) < 0;
        if (!bad && side & SIDE_PYTHON) {
            PyObject *entry = Py_BuildValue("(OIi)", number, turn, side & SIDE_BROKEN ? 1 : 0);
            bad = !entry || PyList_Append(board->sided, entry) < 0;
            Py_XDECREF(entry);
        }
        Py_XDECREF(number);
        if (bad) return -1;
        if (side & SIDE_PYTHON) return 0;
    }
    board->done[slot] = turn;
    return 0;
}
