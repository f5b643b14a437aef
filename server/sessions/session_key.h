// What a session is called in the manager's table and in stores: its name, behind its tenant's and a "~"
// where it has a tenant. Neither part holds a "~".
#ifndef EFLA_SERVER_SESSIONS_SESSION_KEY_H_
#define EFLA_SERVER_SESSIONS_SESSION_KEY_H_

#include <cstddef>
#include <string_view>

namespace efla {

inline constexpr char kTenantEnd = '~';
inline constexpr size_t kMaxTenantPartBytes = 64;

// The key without its tenant.
inline std::string_view NameOf(std::string_view key) {
  const size_t end = key.find(kTenantEnd);
  return end == key.npos ? key : key.substr(end + 1);
}

// Whether a key that begins with `prefix` is of the prefix's tenant: of nobody's where the prefix has no "~".
inline bool IsOfTenant(std::string_view key, std::string_view prefix) {
  return key.find(kTenantEnd, prefix.size()) == key.npos;
}

// Empty, or a tenant alone: the name is to be made.
inline bool WantsName(std::string_view key) { return NameOf(key).empty(); }

// 1 to 64 characters of [A-Za-z0-9._-] stand before the "~", if there is one.
inline bool HasGoodTenant(std::string_view key) {
  const size_t end = key.find(kTenantEnd);
  if (end == key.npos) return true;
  for (const char c : key.substr(0, end)) {
    const bool good = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                      c == '.' || c == '_' || c == '-';
    if (!good) return false;
  }
  return end > 0 && end <= kMaxTenantPartBytes;
}

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_KEY_H_
