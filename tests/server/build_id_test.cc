#include "server/build_id.h"

#include <elf.h>
#include <gtest/gtest.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"

namespace efla {
namespace {

template <typename T>
T ReadAt(const std::string& file, size_t offset) {
  T value{};
  EXPECT_LE(offset + sizeof(T), file.size());
  if (offset + sizeof(T) <= file.size()) std::memcpy(&value, file.data() + offset, sizeof(T));
  return value;
}

// The content of a program's section .note.gnu.build-id behind the note's header and owner, in hexadecimal
// digits: by the file's section headers, of which the running program knows nothing.
std::string BuildIdInFile(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string file(std::istreambuf_iterator<char>(stream), {});
  const auto elf = ReadAt<ElfW(Ehdr)>(file, 0);
  const auto section = [&](size_t i) { return ReadAt<ElfW(Shdr)>(file, elf.e_shoff + i * elf.e_shentsize); };
  const size_t names = section(elf.e_shstrndx).sh_offset;
  for (size_t i = 0; i < elf.e_shnum; ++i) {
    if (std::string(file.c_str() + names + section(i).sh_name) != ".note.gnu.build-id") continue;
    constexpr size_t kBefore = sizeof(ElfW(Nhdr)) + sizeof("GNU");
    return absl::BytesToHexString(file.substr(section(i).sh_offset + kBefore, section(i).sh_size - kBefore));
  }
  return "";
}

std::string Note(uint32_t type, std::string owner, std::string content, size_t alignment) {
  const ElfW(Nhdr) header{static_cast<uint32_t>(owner.size()), static_cast<uint32_t>(content.size()), type};
  std::string note(reinterpret_cast<const char*>(&header), sizeof(header));
  for (const std::string& part : {owner, content}) {
    note += part;
    note.resize((note.size() + alignment - 1) / alignment * alignment);
  }
  return note;
}

const std::string kGnu("GNU\0", 4);
constexpr uint32_t kProperty = 5;  // NT_GNU_PROPERTY_TYPE_0

TEST(BuildIdTest, IsWhatTheLinkerWroteIntoTheProgram) {
  const std::string in_file = BuildIdInFile("/proc/self/exe");
  ASSERT_GE(in_file.size(), 16u) << "linked without --build-id";
  EXPECT_EQ(BuildId(), in_file.substr(0, 16));
}

TEST(BuildIdTest, IsFoundBehindOtherNotes) {
  const std::string id = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14";
  for (const size_t alignment : {size_t{4}, size_t{8}}) {
    const std::string notes = Note(kProperty, kGnu, "twelve bytes", alignment) +
                              Note(NT_GNU_BUILD_ID, "Someone\0", "of another owner", alignment) +
                              Note(NT_GNU_BUILD_ID, kGnu, id, alignment) +
                              Note(NT_GNU_ABI_TAG, kGnu, "behind", alignment);
    EXPECT_EQ(FindBuildId(notes, alignment), id) << alignment;
  }
  EXPECT_EQ(FindBuildId(Note(NT_GNU_BUILD_ID, kGnu, id, 4), 1), id) << "an alignment of 1 stands for 4";
}

TEST(BuildIdTest, IsEmptyWhereThereIsNoneOrNotAllOfIt) {
  EXPECT_EQ(FindBuildId("", 4), "");
  EXPECT_EQ(FindBuildId(Note(kProperty, kGnu, "content", 8), 8), "");
  const std::string note = Note(NT_GNU_BUILD_ID, kGnu, "0123456789abcdef", 4);
  for (size_t size = 0; size < note.size(); ++size) {
    // A buffer of its own, so that a sanitizer sees what is read behind it.
    const std::vector<char> cut(note.begin(), note.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_EQ(FindBuildId({cut.data(), cut.size()}, 4), "") << size;
  }
  std::string endless = note;
  endless.replace(0, 8, 8, '\xff');  // sizes of 4 GiB
  EXPECT_EQ(FindBuildId(endless, 4), "");
}

}  // namespace
}  // namespace efla
