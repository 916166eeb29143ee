// Keyword arguments that are arrays: C-contiguous, of known size, held while the work runs without the interpreter lock.
#ifndef ENVFLEET_ARRAYS_H
#define ENVFLEET_ARRAYS_H
#include <Python.h>
#include <string.h>

// An array of `count` entries of `size` bytes, whose address goes to `to`.
typedef struct { const char *name; void *to; Py_ssize_t count, size; int write; } Array;
enum { READ, WRITE, MOST = 16 };

// Calls work(argument) with the addresses filled in; returns None, or NULL with an exception set.
static PyObject *with_arrays(int (*work)(void *), void *argument, PyObject *given, const Array *arrays, int count) {
    Py_buffer views[MOST];
    int held = 0, failed = 0;
    for (; held < count; held++) {
        const Array *a = &arrays[held];
        PyObject *array = given ? PyDict_GetItemString(given, a->name) : NULL;
        if (!array) {
            PyErr_Format(PyExc_TypeError, "the array %s is missing", a->name);
            break;
        }
        if (PyObject_GetBuffer(array, &views[held], a->write ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0) break;
        if (views[held].itemsize != a->size || views[held].len != a->count * a->size) {
            PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %zd", a->name, views[held].len, a->count * a->size);
            PyBuffer_Release(&views[held]);
            break;
        }
        memcpy(a->to, &views[held].buf, sizeof(void *));
    }
    if (held == count) {
        Py_BEGIN_ALLOW_THREADS
        failed = work(argument);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_NoMemory();
    }
    while (held > 0) PyBuffer_Release(&views[--held]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

#endif
