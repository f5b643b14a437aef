// Which build of the program runs: what its linker computed from the program's content.
#ifndef EFLA_SERVER_BUILD_ID_H_
#define EFLA_SERVER_BUILD_ID_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace efla {

// The first 16 hexadecimal digits of the running program's GNU build id, "unknown" where it has none. Two
// builds of one version from different sources differ in it; stripping a program does not change it.
std::string BuildId();

// The GNU build id in an ELF note segment, as bytes; empty where there is none, or the notes are cut short.
// `alignment` is the segment's: of each note and of each note's content.
std::string_view FindBuildId(std::string_view notes, size_t alignment);

}  // namespace efla

#endif  // EFLA_SERVER_BUILD_ID_H_
