#include "server/build_id.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/escaping.h"

namespace efla {
namespace {

constexpr size_t kShownBytes = 8;

// For dl_iterate_phdr, which begins with the program itself; what is not 0 ends the iteration.
int TakeFirst(dl_phdr_info* program, size_t, void* build_id) {
  for (const auto& segment : std::span(program->dlpi_phdr, program->dlpi_phnum)) {
    if (segment.p_type != PT_NOTE) continue;
    const auto* const begin = reinterpret_cast<const char*>(program->dlpi_addr + segment.p_vaddr);
    const std::string_view found = FindBuildId({begin, segment.p_memsz}, segment.p_align);
    if (!found.empty()) *static_cast<std::string_view*>(build_id) = found;
  }
  return 1;
}

}  // namespace

std::string BuildId() {
  std::string_view build_id;
  dl_iterate_phdr(TakeFirst, &build_id);
  return build_id.empty() ? "unknown" : absl::BytesToHexString(std::string(build_id.substr(0, kShownBytes)));
}

// elf(5), "Notes": a header, a name and a description, each padded.
std::string_view FindBuildId(std::string_view notes, size_t alignment) {
  constexpr std::string_view kOwner("GNU\0", 4);
  const size_t mask = alignment == 8 ? 7 : 3;  // 0 and 1 stand for 4, too
  const auto take = [&](size_t size) {
    const std::string_view taken = notes.substr(0, size);
    notes.remove_prefix(std::min(notes.size(), (size + mask) & ~mask));
    return taken;
  };
  for (ElfW(Nhdr) header; notes.size() >= sizeof(header);) {
    std::memcpy(&header, notes.data(), sizeof(header));
    // Header and name are padded as one.
    const std::string_view name = take(sizeof(header) + header.n_namesz).substr(sizeof(header));
    const std::string_view content = take(header.n_descsz);
    if (content.size() < header.n_descsz) break;
    if (header.n_type == NT_GNU_BUILD_ID && name == kOwner) return content;
  }
  return {};
}

}  // namespace efla
