/* tap.h - tests that report as TAP, for prove. CASE names the checks that follow it, CHECK checks a condition.
 *
 * The checks of a CASE are one line of output. The first check that fails prints its place and values. A test program
 * calls tap_end() last.
 */
#ifndef TAP_H
#define TAP_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static struct {
    int ncases, nfailed;
    const char *name;
    char label[256];
    long checks;
    bool failed;
} tap;

static inline void tap_close(void)
{
    if (!tap.name)
        return;
    printf("%sok %d - %s\n", tap.failed ? "not " : "", ++tap.ncases, tap.name);
    fflush(stdout);
    tap.nfailed += tap.failed;
    tap.name = NULL;
}

__attribute__((format(printf, 1, 2))) static inline void CASE(const char *format, ...)
{
    tap_close();
    va_list args;
    va_start(args, format);
    vsnprintf(tap.label, sizeof tap.label, format, args);
    va_end(args);
    tap.name = tap.label;
    tap.failed = false;
    tap.checks = 0;
}

__attribute__((format(printf, 4, 5))) static inline bool
tap_check(bool holds, const char *file, int line, const char *format, ...)
{
    tap.checks++;
    if (holds)
        return true;
    if (!tap.failed) {
        printf("# %s:%d: ", file, line);
        va_list args;
        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        printf("\n");
        fflush(stdout);
    }
    tap.failed = true;
    return false;
}

/* CHECK(condition) or CHECK(condition, "format", values ...) */
#define CHECK1(condition)                                     tap_check((condition), __FILE__, __LINE__, "%s", #condition)
#define CHECK_PICK(_1, _2, _3, _4, _5, _6, _7, _8, NAME, ...) NAME
#define CHECKF(condition, ...)                                tap_check((condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK(...)                                                                                 \
    CHECK_PICK(__VA_ARGS__, CHECKF, CHECKF, CHECKF, CHECKF, CHECKF, CHECKF, CHECKF, CHECK1, )      \
    (__VA_ARGS__)

/* Checks that a call succeeds. On failure prints the message of the library. */
#define OK(call) tap_check((call) == RSD_OK, __FILE__, __LINE__, "%s: %s", #call, rsd_error())

/* Checks that a call fails with this status and a message that contains this text. */
#define FAILS(status, text, call)                                                                  \
    do {                                                                                           \
        rsd_status got_ = (call);                                                                  \
        tap_check(got_ == (status), __FILE__, __LINE__, "%s: %s (%s)", #call,                      \
                  rsd_status_name(got_), rsd_error());                                             \
        tap_check(strstr(rsd_error(), (text)) != NULL, __FILE__, __LINE__, "'%s' is not in '%s'",  \
                  (text), rsd_error());                                                            \
    } while (0)

static inline int tap_end(void)
{
    tap_close();
    printf("1..%d\n", tap.ncases);
    return tap.nfailed ? 1 : 0;
}

#endif
