#include "server/rpc/tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace efla {
namespace {

using std::chrono::system_clock;
using X509Ptr = std::unique_ptr<X509, decltype(&X509_free)>;
using BioPtr = std::unique_ptr<BIO, decltype(&BIO_free)>;
using KeyPtr = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

BioPtr ReadFrom(const std::string& pem) {
  return {BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free};
}

absl::Status Wrong(const std::string& path, const char* what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s %s", path, what));
}

// OpenSSL would ask a terminal for the password.
int NoPassword(char*, int, int, void*) { return 0; }

absl::StatusOr<std::vector<X509Ptr>> Certificates(const std::string& path, const std::string& pem) {
  std::vector<X509Ptr> certificates;
  const BioPtr bio = ReadFrom(pem);
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(certificate, X509_free);
  }
  if (certificates.empty()) return Wrong(path, "holds no certificate in PEM form");
  return certificates;
}

system_clock::time_point EndOf(const X509& certificate) {
  std::tm time{};
  EFLA_CHECK(ASN1_TIME_to_tm(X509_get0_notAfter(&certificate), &time) == 1);
  return system_clock::from_time_t(timegm(&time));
}

}  // namespace

TlsIdentity::TlsIdentity(const TlsFiles& files)
    : files_(files),
      changes_(files.client_ca.empty()
                   ? std::vector<std::string>{files.certificate, files.key}
                   : std::vector<std::string>{files.certificate, files.key, files.client_ca}) {}

absl::StatusOr<std::unique_ptr<TlsIdentity>> TlsIdentity::Open(const TlsFiles& files) {
  std::unique_ptr<TlsIdentity> identity(new TlsIdentity(files));
  absl::StatusOr<bool> loaded = identity->Reload(/*force=*/true);
  if (!loaded.ok()) return loaded.status();
  return identity;
}

absl::StatusOr<TlsIdentity::Pem> TlsIdentity::Read() const {
  Pem pem;
  absl::StatusOr<std::string> certificate = ReadSmallFile(files_.certificate);
  if (!certificate.ok()) return certificate.status();
  pem.certificate = *std::move(certificate);
  absl::StatusOr<std::string> key = ReadSmallFile(files_.key);
  if (!key.ok()) return key.status();
  pem.key = *std::move(key);

  const absl::StatusOr<std::vector<X509Ptr>> chain = Certificates(files_.certificate, pem.certificate);
  if (!chain.ok()) return chain.status();
  X509& own = *chain->front();
  const KeyPtr parsed(PEM_read_bio_PrivateKey(ReadFrom(pem.key).get(), nullptr, NoPassword, nullptr),
                      EVP_PKEY_free);
  if (parsed == nullptr) return Wrong(files_.key, "holds no private key in PEM form, or one with a password");
  if (X509_check_private_key(&own, parsed.get()) != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not the key of the certificate in %s", files_.key, files_.certificate));
  }
  pem.certificate_ends = EndOf(own);
  if (pem.certificate_ends <= system_clock::now()) {
    return Wrong(files_.certificate, "holds a certificate that has expired");
  }
  pem.client_ca_ends = system_clock::time_point::max();
  if (!files_.client_ca.empty()) {
    absl::StatusOr<std::string> authorities = ReadSmallFile(files_.client_ca);
    if (!authorities.ok()) return authorities.status();
    pem.client_ca = *std::move(authorities);
    const absl::StatusOr<std::vector<X509Ptr>> parsed_authorities =
        Certificates(files_.client_ca, pem.client_ca);
    if (!parsed_authorities.ok()) return parsed_authorities.status();
    for (const X509Ptr& authority : *parsed_authorities) {
      pem.client_ca_ends = std::min(pem.client_ca_ends, EndOf(*authority));
    }
  }
  return pem;
}

absl::StatusOr<bool> TlsIdentity::Reload(bool force) {
  const bool changed = changes_.Look();
  if (!changed && !force && !failed_) return false;
  absl::StatusOr<Pem> read = Read();
  const bool failed_before = std::exchange(failed_, !read.ok());
  if (!read.ok()) {
    if (failed_before && !changed && !force) return false;  // has been told
    return read.status();
  }
  const std::scoped_lock lock(mutex_);
  pem_ = *std::move(read);
  ++version_;
  return true;
}

system_clock::time_point TlsIdentity::certificate_ends() const {
  const std::scoped_lock lock(mutex_);
  return pem_.certificate_ends;
}

system_clock::time_point TlsIdentity::client_ca_ends() const {
  const std::scoped_lock lock(mutex_);
  return pem_.client_ca_ends;
}

// gRPC asks for the files' contents before each handshake, which SslServerCredentials has no way to answer.
class TlsServerCredentials final : public grpc::ServerCredentials {
 public:
  explicit TlsServerCredentials(const TlsIdentity& identity) : identity_(identity) {
    const auto request = identity.files_.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                         : identity.files_.require_client_cert
                             ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                             : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(request, Fetch, this));
  }
  ~TlsServerCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    EFLA_CHECK(false);  // nobody here does
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  // Any of gRPC's threads.
  static grpc_ssl_certificate_config_reload_status Fetch(void* self,
                                                         grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsServerCredentials*>(self)->Fetch(config);
  }
  grpc_ssl_certificate_config_reload_status Fetch(grpc_ssl_server_certificate_config** config) {
    const std::scoped_lock lock(identity_.mutex_);
    if (fetched_ == identity_.version_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const TlsIdentity::Pem& pem = identity_.pem_;
    const grpc_ssl_pem_key_cert_pair pair = {pem.key.c_str(), pem.certificate.c_str()};
    // gRPC aborts without authorities. Where no client is asked for a certificate, they are never looked at.
    const std::string& authorities = pem.client_ca.empty() ? pem.certificate : pem.client_ca;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    fetched_ = identity_.version_;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const TlsIdentity& identity_;
  uint64_t fetched_ = 0;  // guarded by the identity's mutex
  grpc_server_credentials* credentials_;
};

std::shared_ptr<grpc::ServerCredentials> TlsIdentity::NewCredentials() {
  return std::make_shared<TlsServerCredentials>(*this);
}

}  // namespace efla
