// Names that nothing else has.
#ifndef EFLA_SERVER_SESSIONS_RANDOM_ID_H_
#define EFLA_SERVER_SESSIONS_RANDOM_ID_H_

#include <cstdint>
#include <random>
#include <string>

namespace efla {

// 128 random bits in hexadecimal.
inline std::string RandomId() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::random_device device;
  std::string id;
  for (int word = 0; word < 4; ++word) {
    const uint32_t bits = device();
    for (int shift = 28; shift >= 0; shift -= 4) id += kDigits[bits >> shift & 15];
  }
  return id;
}

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_RANDOM_ID_H_
