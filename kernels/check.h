// EFLA_CHECK ends the process when our own code broke a contract. No input from outside may reach one:
// callers, files, machines and devices get a status instead.
#ifndef EFLA_KERNELS_CHECK_H_
#define EFLA_KERNELS_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define EFLA_CHECK(condition)                                                               \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      std::fprintf(stderr, "%s:%d: broken contract: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)

#endif  // EFLA_KERNELS_CHECK_H_
