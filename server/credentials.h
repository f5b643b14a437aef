// Who may call: the tokens of the auth file, and what each may do.
//
// The file is JSON:
//
//   {"tenants": {"acme": {"requests_per_second": 20, "burst": 40, "tokens_per_minute": 60000,
//                         "max_concurrent": 32, "max_queued": 16, "max_sessions": 1000}},
//    "tokens": [{"name": "acme-web", "sha256": "<64 hexadecimal digits>", "tenant": "acme",
//                "roles": ["user"], "max_priority": 2, "expires": "2030-01-31T00:00:00Z"}]}
//
// It holds no token, only SHA-256 hashes; tokens are random (efla token makes them), so a hash tells nothing.
// Limits that are left out do not bound, nor does a tenant without an entry; 0 is refused, for it might mean
// that nothing is to pass. A key that is not known, or there twice, is an error.
#ifndef EFLA_SERVER_CREDENTIALS_H_
#define EFLA_SERVER_CREDENTIALS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace efla {

// Of all of a tenant's tokens together. 0 stands for no limit: the file has none.
struct TenantLimits {
  double requests_per_second = 0;
  double burst = 0;              // requests at once; 0: a second's worth, one at least
  double tokens_per_minute = 0;  // prompt and drawn ones; a minute's worth at once
  int max_concurrent = 0;        // calls that use the engine, waiting ones included
  int max_queued = 0;            // of these, those that wait for their first step
  int max_sessions = 0;

  friend bool operator==(const TenantLimits&, const TenantLimits&) = default;
};

struct Credential {
  std::string name;    // for logs and metrics
  std::string tenant;  // 1 to 64 characters of [A-Za-z0-9._-]
  bool user = false;   // Generation, Sessions, Models
  bool admin = false;  // Admin
  int max_priority = 0;
  std::optional<std::chrono::system_clock::time_point> expires;
};

inline constexpr size_t kMaxTenantBytes = 64;

using TokenHash = std::array<unsigned char, 32>;  // SHA-256
TokenHash HashToken(std::string_view token);
std::string ToHex(const TokenHash& hash);

// The tokens of one reading of the file. Immutable.
class Credentials {
 public:
  // INVALID_ARGUMENT naming the place in the file and what is wrong there.
  static absl::StatusOr<Credentials> Parse(std::string_view json);

  // Null: there is no such token. Compares with every hash, each in constant time. Whether it has expired is
  // the caller's to look at.
  const Credential* Find(std::string_view token) const;
  // Of every tenant that a token or the file's table names.
  const std::map<std::string, TenantLimits>& tenants() const { return tenants_; }
  size_t num_tokens() const { return tokens_.size(); }

 private:
  struct Token {
    TokenHash hash;
    Credential credential;
  };
  std::vector<Token> tokens_;
  std::map<std::string, TenantLimits> tenants_;
};

// Notices that a file has been replaced or written: by its inode, size and time of change.
class FileChanges {
 public:
  explicit FileChanges(std::vector<std::string> paths) : paths_(std::move(paths)) {}
  // Whether one of them is another than at the last call; true at the first.
  bool Look();

 private:
  struct Stamp {
    uint64_t device = 0, inode = 0;
    int64_t size = -1, seconds = 0, nanoseconds = 0;  // -1: there is no such file
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };
  const std::vector<std::string> paths_;
  std::vector<Stamp> stamps_;
};

// The auth file, followed. Reload from one thread; current from any.
class AuthFile {
 public:
  // Fails as Credentials::Parse, naming the file; NOT_FOUND and the like where it cannot be read.
  static absl::StatusOr<std::unique_ptr<AuthFile>> Open(const std::string& path);

  std::shared_ptr<const Credentials> current() const;

  // Reads the file again when it has changed, or at any rate with `force`. True: there is a new reading. An
  // error leaves the old one in force, and is returned once.
  absl::StatusOr<bool> Reload(bool force);

 private:
  explicit AuthFile(std::string path) : path_(std::move(path)), changes_({path_}) {}
  absl::StatusOr<Credentials> Read() const;

  const std::string path_;
  FileChanges changes_;
  mutable std::mutex mutex_;  // guards current_
  std::shared_ptr<const Credentials> current_;
};

// The whole file. Errors name it.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace efla

#endif  // EFLA_SERVER_CREDENTIALS_H_
