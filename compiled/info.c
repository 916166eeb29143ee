// Infos of plain values as bytes: the usual infos (numbers, flags, strings, small arrays), at a twentieth of pickle's cost.
//
// A byte INFO_PLAIN (no pickle begins with it), then per entry: u32 length and bytes of the key, u8 kind, value. src/envfleet/core/infos.py
// reads it. If the dict contains anything else, all of it is pickled instead.
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL envfleet_array_api
#define NO_IMPORT_ARRAY
#include "envfleet.h"
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

enum { INFO_PLAIN = 1 };
enum { KIND_FLOAT, KIND_INT, KIND_FALSE, KIND_TRUE, KIND_NONE, KIND_TEXT, KIND_SCALAR, KIND_ARRAY };

typedef struct {
    char *at, *end;
} Room;

static int put(Room *room, const void *data, Py_ssize_t size) {
    if (size > room->end - room->at) return -1;
    memcpy(room->at, data, size);
    room->at += size;
    return 0;
}

static int put_byte(Room *room, int value) {
    char byte = (char)value;
    return put(room, &byte, 1);
}

// Scalars and arrays whose bytes say everything: numbers and flags in the machine's own order.
static int is_simple(PyArray_Descr *descr) {
    return PyDataType_ISNUMBER(descr) || PyDataType_ISBOOL(descr) ? PyArray_ISNBO(descr->byteorder) : 0;
}

static int put_scalar(Room *room, PyObject *value) {
    PyArray_Descr *descr = PyArray_DescrFromScalar(value);
    if (!descr) return -1;
    char bytes[32];
    Py_ssize_t size = PyDataType_ELSIZE(descr);
    int bad = !is_simple(descr) || size > (Py_ssize_t)sizeof bytes;
    if (!bad) {
        PyArray_ScalarAsCtype(value, bytes);
        bad = put_byte(room, KIND_SCALAR) || put_byte(room, descr->type_num) || put(room, bytes, size);
    }
    Py_DECREF(descr);
    return bad ? -1 : 0;
}

static int put_array(Room *room, PyArrayObject *array) {
    int ndim = PyArray_NDIM(array);
    if (!is_simple(PyArray_DESCR(array)) || !PyArray_IS_C_CONTIGUOUS(array)) return -1;
    if (put_byte(room, KIND_ARRAY) || put_byte(room, PyArray_TYPE(array)) || put_byte(room, ndim)) return -1;
    for (int i = 0; i < ndim; i++) {
        int64_t size = PyArray_DIM(array, i);
        if (put(room, &size, 8)) return -1;
    }
    return put(room, PyArray_DATA(array), PyArray_NBYTES(array));
}

static int put_text(Room *room, PyObject *text) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(text, &size);
    uint32_t length = (uint32_t)size;
    return !data || size > UINT32_MAX || put(room, &length, 4) || put(room, data, size) ? -1 : 0;
}

static int put_value(Room *room, PyObject *value) {
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        return put_byte(room, KIND_FLOAT) || put(room, &number, 8) ? -1 : 0;
    }
    if (value == Py_True || value == Py_False) return put_byte(room, value == Py_True ? KIND_TRUE : KIND_FALSE);
    if (value == Py_None) return put_byte(room, KIND_NONE);
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow || put_byte(room, KIND_INT) || put(room, &number, 8) ? -1 : 0;
    }
    if (PyUnicode_CheckExact(value)) return put_byte(room, KIND_TEXT) || put_text(room, value) ? -1 : 0;
    if (PyArray_CheckExact(value)) return put_array(room, (PyArrayObject *)value);
    if (PyArray_IsScalar(value, Number) || PyArray_IsScalar(value, Bool)) return put_scalar(room, value);
    return -1;
}

// The number of bytes written, or -1 when the info is not plain or does not fit; no exception either way.
Py_ssize_t info_encode(PyObject *info, char *out, Py_ssize_t room_bytes) {
    Room room = {out, out + room_bytes};
    PyObject *key, *value;
    Py_ssize_t position = 0;
    int bad = put_byte(&room, INFO_PLAIN);
    while (!bad && PyDict_Next(info, &position, &key, &value))
        bad = !PyUnicode_CheckExact(key) || put_text(&room, key) || put_value(&room, value);
    if (PyErr_Occurred()) PyErr_Clear(); // a lone surrogate in a string: pickle can take it
    return bad ? -1 : room.at - out;
}
