// TLS of the gRPC listener: certificate, key and the authorities of clients' certificates, from files that
// may be replaced while the server runs.
#ifndef EFLA_SERVER_RPC_TLS_H_
#define EFLA_SERVER_RPC_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/credentials.h"

namespace efla {

struct TlsFiles {
  std::string certificate, key;      // PEM: the chain, the server's own certificate first; empty: no TLS
  std::string client_ca;             // PEM; empty: clients show no certificate
  bool require_client_cert = false;  // else one that is shown must be good
};

// Reload from one thread, the rest from any. Handshakes from a reload on use the new files; connections stay
// as they are. TLS 1.2 and 1.3.
class TlsIdentity {
 public:
  // FAILED_PRECONDITION or INVALID_ARGUMENT naming the file: it cannot be read, holds no certificate or key,
  // the key is encrypted or another certificate's, the certificate has expired.
  static absl::StatusOr<std::unique_ptr<TlsIdentity>> Open(const TlsFiles& files);

  // Takes the files again when they have changed, or at any rate with `force`; true: there is something new.
  // An error leaves the old ones in use. Files that do not fit together yet are tried again at the next call:
  // they are perhaps being replaced, one after the other.
  absl::StatusOr<bool> Reload(bool force);

  // For one listening port. They and this object must outlive the server.
  std::shared_ptr<grpc::ServerCredentials> NewCredentials();

  // When the server's certificate, and the first of the clients' authorities (max() without one), end.
  std::chrono::system_clock::time_point certificate_ends() const;
  std::chrono::system_clock::time_point client_ca_ends() const;

 private:
  friend class TlsServerCredentials;
  struct Pem {
    std::string certificate, key, client_ca;
    std::chrono::system_clock::time_point certificate_ends, client_ca_ends;
  };
  explicit TlsIdentity(const TlsFiles& files);
  absl::StatusOr<Pem> Read() const;

  const TlsFiles files_;
  FileChanges changes_;
  bool failed_ = false;       // Reload's thread: the last reading
  mutable std::mutex mutex_;  // guards what follows
  Pem pem_;
  uint64_t version_ = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_TLS_H_
