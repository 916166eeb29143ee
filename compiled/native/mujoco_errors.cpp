// MuJoCo calls mju_user_error when it cannot go on, and that must not return. Inside our calls it becomes an error of the environment;
// elsewhere whoever handled it before does.
#include "mujoco_engine.h"
#include <csetjmp>
#include <cstdlib>

namespace {

typedef void (*Handler)(const char *);

Handler former;
thread_local jmp_buf *way_out; // NULL: this thread is in none of our calls
thread_local char message[ENVFLEET_ERROR_BYTES];

void on_error(const char *text) {
    if (way_out) {
        snprintf(message, sizeof message, "MuJoCo: %s", text);
        longjmp(*way_out, 1);
    }
    if (former) former(text);
    fprintf(stderr, "ERROR: %s\n\n", text); // what MuJoCo does without a handler
    exit(EXIT_FAILURE);
}

} // namespace

bool mujoco::guarded(void (*work)(void *), void *argument, std::string &error) {
    jmp_buf here, *outer = way_out;
    if (setjmp(here)) {
        way_out = outer;
        error = message;
        return false;
    }
    way_out = &here;
    work(argument);
    way_out = outer;
    return true;
}

// Python gives the address of `mju_user_error`, and holds the interpreter lock: no two at once.
ENVFLEET_EXPORT void envfleet_mujoco_handle_errors(Handler *user_error) {
    if (*user_error == on_error) return;
    former = *user_error;
    *user_error = on_error;
}
