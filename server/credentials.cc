#include "server/credentials.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/strict_json.h"
#include "nlohmann/json.hpp"
#include "server/engine/generation.h"

namespace efla {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTokens = 10'000, kMaxFileBytes = size_t{16} << 20;
constexpr double kMostPerSecond = 1e9;
constexpr int kMostCount = 1'000'000'000;

absl::Status Wrong(std::string_view where, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s %s", where, what));
}

absl::Status CheckKeys(const Json& object, std::string_view where, const std::set<std::string>& known) {
  if (!object.is_object()) return Wrong(where, "is no JSON object");
  for (const auto& [key, value] : object.items()) {
    if (!known.contains(key)) return Wrong(where, absl::StrFormat("has \"%s\", which is not known", key));
  }
  return absl::OkStatus();
}

bool IsName(std::string_view name, size_t max_bytes) {
  return !name.empty() && name.size() <= max_bytes && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

absl::Status ReadName(const Json& object, std::string_view where, const char* key, std::string& out) {
  const auto found = object.find(key);
  if (found == object.end()) return Wrong(where, absl::StrFormat("has no \"%s\"", key));
  if (found->is_string()) out = found->get<std::string>();
  if (found->is_string() && IsName(out, kMaxTenantBytes)) return absl::OkStatus();
  return Wrong(where, absl::StrFormat("has a \"%s\" that is not 1 to %d characters of [A-Za-z0-9._-]", key,
                                      kMaxTenantBytes));
}

absl::Status ReadRate(const Json& object, std::string_view where, const char* key, double& out) {
  const auto found = object.find(key);
  if (found == object.end()) return absl::OkStatus();
  if (found->is_number()) out = found->get<double>();
  if (found->is_number() && out > 0 && out <= kMostPerSecond) return absl::OkStatus();
  return Wrong(where,
               absl::StrFormat("has a \"%s\" that is not a number above 0, up to %g", key, kMostPerSecond));
}

absl::Status ReadCount(const Json& object, std::string_view where, const char* key, int least, int most,
                       int& out) {
  const auto found = object.find(key);
  if (found == object.end()) return absl::OkStatus();
  int64_t count = std::numeric_limits<int64_t>::min();
  if (found->is_number_integer()) count = found->get<int64_t>();
  if (found->is_number_unsigned() && found->get<uint64_t>() > static_cast<uint64_t>(kMostCount))
    count = INT64_MAX;
  if (count < least || count > most) {
    return Wrong(where,
                 absl::StrFormat("has a \"%s\" that is not a whole number from %d to %d", key, least, most));
  }
  out = static_cast<int>(count);
  return absl::OkStatus();
}

absl::StatusOr<TenantLimits> ReadLimits(const Json& object, std::string_view where) {
  absl::Status status = CheckKeys(
      object, where,
      {"requests_per_second", "burst", "tokens_per_minute", "max_concurrent", "max_queued", "max_sessions"});
  if (!status.ok()) return status;
  TenantLimits limits;
  status.Update(ReadRate(object, where, "requests_per_second", limits.requests_per_second));
  status.Update(ReadRate(object, where, "burst", limits.burst));
  status.Update(ReadRate(object, where, "tokens_per_minute", limits.tokens_per_minute));
  status.Update(ReadCount(object, where, "max_concurrent", 1, kMostCount, limits.max_concurrent));
  status.Update(ReadCount(object, where, "max_queued", 1, kMostCount, limits.max_queued));
  status.Update(ReadCount(object, where, "max_sessions", 1, kMostCount, limits.max_sessions));
  if (status.ok() && limits.burst > 0 && limits.requests_per_second == 0) {
    status = Wrong(where, "has a \"burst\" and no \"requests_per_second\"");
  }
  if (status.ok() && limits.burst > 0 && limits.burst < 1) {
    status = Wrong(where, absl::StrFormat("has a \"burst\" of %g; no request could ever pass", limits.burst));
  }
  if (!status.ok()) return status;
  return limits;
}

absl::StatusOr<TokenHash> ReadHash(const Json& object, std::string_view where) {
  const auto found = object.find("sha256");
  const std::string text = found != object.end() && found->is_string() ? found->get<std::string>() : "";
  TokenHash hash{};
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  bool good = text.size() == 2 * hash.size();
  for (size_t i = 0; good && i < hash.size(); ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    good = high >= 0 && low >= 0;
    hash[i] = static_cast<unsigned char>(high << 4 | low);
  }
  // The text is not repeated: it might be a token in the wrong place.
  if (!good) return Wrong(where, "has no \"sha256\" of 64 hexadecimal digits in lower case");
  return hash;
}

absl::Status ReadRoles(const Json& object, std::string_view where, Credential& credential) {
  const auto found = object.find("roles");
  const absl::Status wrong = Wrong(where, "has no \"roles\", a list of \"user\" and \"admin\"");
  if (found == object.end() || !found->is_array() || found->empty()) return wrong;
  for (const Json& role : *found) {
    if (role == "user") {
      credential.user = true;
    } else if (role == "admin") {
      credential.admin = true;
    } else {
      return wrong;
    }
  }
  return absl::OkStatus();
}

absl::Status ReadExpiry(const Json& object, std::string_view where, Credential& credential) {
  const auto found = object.find("expires");
  if (found == object.end()) return absl::OkStatus();
  const std::string text = found->is_string() ? found->get<std::string>() : "";
  std::tm time{};
  const char* const end = strptime(text.c_str(), "%Y-%m-%dT%H:%M:%SZ", &time);
  if (end == nullptr || *end != '\0') {
    return Wrong(where, "has an \"expires\" that is not of the form 2030-01-31T00:00:00Z");
  }
  credential.expires = std::chrono::system_clock::from_time_t(timegm(&time));
  return absl::OkStatus();
}

}  // namespace

TokenHash HashToken(std::string_view token) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

std::string ToHex(const TokenHash& hash) {
  std::string text;
  for (const unsigned char byte : hash) text += absl::StrFormat("%02x", byte);
  return text;
}

absl::StatusOr<Credentials> Credentials::Parse(std::string_view json) {
  const Json file = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded()) return absl::InvalidArgumentError("the file is no JSON");
  if (file.is_object()) {  // of a key that is there twice, the tree above has the last
    if (const auto strict = ParseJsonObject(json, "the file"); !strict.ok()) return strict.status();
  }
  absl::Status status = CheckKeys(file, "the file", {"tenants", "tokens"});
  if (!status.ok()) return status;
  Credentials credentials;
  if (const auto tenants = file.find("tenants"); tenants != file.end()) {
    if (!tenants->is_object()) return Wrong("\"tenants\"", "is no JSON object");
    for (const auto& [tenant, limits] : tenants->items()) {
      const std::string where = absl::StrFormat("tenants[\"%s\"]", tenant);
      if (!IsName(tenant, kMaxTenantBytes)) {
        return Wrong(where, absl::StrFormat("is named with other than 1 to %d characters of [A-Za-z0-9._-]",
                                            kMaxTenantBytes));
      }
      absl::StatusOr<TenantLimits> read = ReadLimits(limits, where);
      if (!read.ok()) return read.status();
      credentials.tenants_[tenant] = *read;
    }
  }
  const auto tokens = file.find("tokens");
  if (tokens == file.end() || !tokens->is_array()) return Wrong("the file", "has no list \"tokens\"");
  if (tokens->size() > kMaxTokens) {
    return Wrong("\"tokens\"",
                 absl::StrFormat("has %d entries; the limit is %d", tokens->size(), kMaxTokens));
  }
  std::set<std::string> names;
  std::set<TokenHash> hashes;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const Json& entry = (*tokens)[i];
    const std::string where = absl::StrFormat("tokens[%d]", i);
    status = CheckKeys(entry, where, {"name", "sha256", "tenant", "roles", "max_priority", "expires"});
    if (!status.ok()) return status;
    Token token;
    absl::StatusOr<TokenHash> hash = ReadHash(entry, where);
    if (!hash.ok()) return hash.status();
    token.hash = *hash;
    status.Update(ReadName(entry, where, "name", token.credential.name));
    status.Update(ReadName(entry, where, "tenant", token.credential.tenant));
    status.Update(ReadRoles(entry, where, token.credential));
    status.Update(ReadCount(entry, where, "max_priority", kLowestPriority, kHighestPriority,
                            token.credential.max_priority));
    status.Update(ReadExpiry(entry, where, token.credential));
    if (!status.ok()) return status;
    if (!names.insert(token.credential.name).second) {
      return Wrong(where, absl::StrFormat("has the name \"%s\" a second time", token.credential.name));
    }
    if (!hashes.insert(token.hash).second) return Wrong(where, "has a hash that another entry has");
    credentials.tenants_.try_emplace(token.credential.tenant);
    credentials.tokens_.push_back(std::move(token));
  }
  return credentials;
}

const Credential* Credentials::Find(std::string_view token) const {
  const TokenHash hash = HashToken(token);
  const Credential* found = nullptr;
  for (const Token& known : tokens_) {
    if (CRYPTO_memcmp(known.hash.data(), hash.data(), hash.size()) == 0) found = &known.credential;
  }
  return found;
}

bool FileChanges::Look() {
  std::vector<Stamp> now;
  for (const std::string& path : paths_) {
    Stamp& stamp = now.emplace_back();
    struct stat file;
    if (stat(path.c_str(), &file) != 0) continue;
    stamp = {.device = file.st_dev,
             .inode = file.st_ino,
             .size = file.st_size,
             .seconds = file.st_mtim.tv_sec,
             .nanoseconds = file.st_mtim.tv_nsec};
  }
  const bool changed = now != stamps_;
  stamps_ = std::move(now);
  return changed;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  if (file) {
    text.resize(kMaxFileBytes + 1);
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(file.gcount()));
  }
  if (!file.is_open() || file.bad() || (file.fail() && !file.eof())) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot read %s: %s", path, errno == 0 ? "it is no file" : std::strerror(errno)));
  }
  if (text.size() > kMaxFileBytes) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s has more than %d bytes, the limit", path, kMaxFileBytes));
  }
  return text;
}

absl::StatusOr<std::unique_ptr<AuthFile>> AuthFile::Open(const std::string& path) {
  std::unique_ptr<AuthFile> file(new AuthFile(path));
  absl::StatusOr<bool> loaded = file->Reload(/*force=*/true);
  if (!loaded.ok()) return loaded.status();
  return file;
}

std::shared_ptr<const Credentials> AuthFile::current() const {
  const std::scoped_lock lock(mutex_);
  return current_;
}

absl::StatusOr<Credentials> AuthFile::Read() const {
  absl::StatusOr<std::string> text = ReadSmallFile(path_);
  if (!text.ok()) return text.status();
  absl::StatusOr<Credentials> parsed = Credentials::Parse(*text);
  if (parsed.ok()) return parsed;
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path_, std::string(parsed.status().message())));
}

absl::StatusOr<bool> AuthFile::Reload(bool force) {
  if (!changes_.Look() && !force) return false;
  absl::StatusOr<Credentials> read = Read();
  if (!read.ok()) return read.status();
  auto fresh = std::make_shared<const Credentials>(*std::move(read));
  const std::scoped_lock lock(mutex_);
  current_ = std::move(fresh);
  return true;
}

}  // namespace efla
