// The ordinary step of a parallel env of many agents: all agents act, all get an observation, none ends, all infos are
// empty. All else (births, deaths, ends, infos, other types) goes to the AgentEnv in Python, which is the
// specification: src/envfleet/multiagent/pettingzoo.py, ParallelAgentEnv.take.
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL envfleet_array_api
#define NO_IMPORT_ARRAY
#include "envfleet.h"
#include <numpy/arrayobject.h>

#define HEAD(runner, slot, name) ((runner)->head + (slot) * (runner)->stride + (runner)->at.name)

// {agent: action} of the agents that are active.
PyObject *agents_action(Runner *runner, Py_ssize_t slot) {
    PyArrayObject *like = (PyArrayObject *)runner->action_like;
    PyArray_Descr *kind = PyArray_DESCR(like);
    Py_ssize_t bytes = runner->action_bytes / runner->num_agents;
    char *data = runner->action + slot * runner->action_bytes, *active = HEAD(runner, slot, active);
    PyObject *made = PyDict_New();
    for (Py_ssize_t i = 0; made && i < runner->num_agents; i++, data += bytes) {
        if (!active[i]) continue;
        PyObject *value;
        if (PyArray_NDIM(like) == 3) {
            value = PyArray_Scalar(data, kind, NULL);
        } else {
            Py_INCREF(kind);
            value = PyArray_NewFromDescr(&PyArray_Type, kind, PyArray_NDIM(like) - 3, PyArray_DIMS(like) + 3, NULL, NULL, 0,
                                         NULL);
            if (value) memcpy(PyArray_DATA((PyArrayObject *)value), data, bytes);
        }
        if (!value || PyDict_SetItem(made, PyTuple_GET_ITEM(runner->agents, i), value) < 0) Py_CLEAR(made);
        Py_XDECREF(value);
    }
    return made;
}

static int is_plain_obs(Runner *runner, PyObject *obs) {
    PyArrayObject *like = (PyArrayObject *)runner->obs_like;
    if (runner->obs_is_int64_scalar) {
        int overflow = 0;
        if (!PyLong_CheckExact(obs)) return 0;
        PyLong_AsLongLongAndOverflow(obs, &overflow);
        return !overflow;
    }
    if (!PyArray_CheckExact(obs)) return 0;
    PyArrayObject *array = (PyArrayObject *)obs;
    int ndim = PyArray_NDIM(like) - 3;
    return PyArray_NDIM(array) == ndim && PyArray_IS_C_CONTIGUOUS(array) &&
           PyArray_EquivTypes(PyArray_DESCR(array), PyArray_DESCR(like)) &&
           PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(like) + 3, ndim);
}

static int all_infos_empty(PyObject *infos) {
    PyObject *key, *info;
    Py_ssize_t position = 0;
    while (PyDict_Next(infos, &position, &key, &info))
        if (!PyDict_CheckExact(info) || PyDict_GET_SIZE(info)) return 0;
    return 1;
}

// Whether `agents` of the env names as many as there can be: all are alive.
static int all_alive(Runner *runner, Py_ssize_t slot) {
    PyObject *env = Py_XNewRef(runner->slots[slot].env); // looking may run Python, which may disarm the slot
    PyObject *alive = env ? PyObject_GetAttrString(env, "agents") : NULL;
    int all = alive && PyList_CheckExact(alive) && PyList_GET_SIZE(alive) == runner->num_agents;
    Py_XDECREF(alive);
    Py_XDECREF(env);
    PyErr_Clear();
    return all;
}

// Writes the row when the result is ordinary: 1. Else 0, and nothing was written.
int agents_take(Runner *runner, Py_ssize_t slot, PyObject *result) {
    Py_ssize_t count = runner->num_agents;
    char *active = HEAD(runner, slot, active);
    if (runner->has_columns || memchr(active, 0, count) || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5)
        return 0;
    PyObject *parts[5];
    for (int k = 0; k < 5; k++) {
        parts[k] = PyTuple_GET_ITEM(result, k);
        if (!PyDict_Check(parts[k]) || (k < 4 && PyDict_GET_SIZE(parts[k]) != count)) return 0;
    }
    if (!all_infos_empty(parts[4]) || !all_alive(runner, slot)) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *found[4], *agent = PyTuple_GET_ITEM(runner->agents, i);
        for (int k = 0; k < 4; k++) {
            found[k] = PyDict_GetItemWithError(parts[k], agent);
            if (!found[k]) {
                PyErr_Clear();
                return 0;
            }
        }
        int ends, cut;
        if (!is_plain_obs(runner, found[0]) || !is_number(found[1], &runner->rewards[i]) || !is_bool(found[2], &ends) ||
            !is_bool(found[3], &cut) || ends || cut)
            return 0;
        runner->seen[i] = found[0]; // borrowed from the result, which the caller holds
    }
    Py_ssize_t bytes = runner->obs_bytes / count;
    char *row = runner->obs + slot * runner->obs_bytes;
    double *reward = (double *)HEAD(runner, slot, reward), *ep_return = (double *)HEAD(runner, slot, ep_return),
           *now_return = (double *)HEAD(runner, slot, now_return);
    for (Py_ssize_t i = 0; i < count; i++, row += bytes) {
        if (runner->obs_is_int64_scalar)
            *(int64_t *)row = PyLong_AsLongLong(runner->seen[i]);
        else
            memcpy(row, PyArray_DATA((PyArrayObject *)runner->seen[i]), bytes);
        reward[i] = 0.0 + runner->rewards[i]; // as the sum in AgentEnv: -0.0 becomes 0.0
        now_return[i] += runner->rewards[i];
        ep_return[i] = now_return[i];
    }
    memset(HEAD(runner, slot, terminated), 0, count);
    memset(HEAD(runner, slot, truncated), 0, count);
    memset(HEAD(runner, slot, pending), 0, count);
    memset(HEAD(runner, slot, scored), 1, count);
    *HEAD(runner, slot, over) = 0;
    int64_t step = (*(int64_t *)HEAD(runner, slot, now_length))++;
    *(int64_t *)HEAD(runner, slot, episode) = *(int64_t *)HEAD(runner, slot, started) - 1;
    *(int64_t *)HEAD(runner, slot, step) = step;
    *(int64_t *)HEAD(runner, slot, length) = step + 1;
    *(int64_t *)HEAD(runner, slot, task) = *(int64_t *)HEAD(runner, slot, now_task);
    *(int64_t *)HEAD(runner, slot, seed) = *(int64_t *)HEAD(runner, slot, now_seed);
    *HEAD(runner, slot, status) = 0;
    return 1;
}
