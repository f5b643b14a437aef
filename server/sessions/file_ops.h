// The operating system's calls that the disk store makes on its files: the one door, so that tests can put a
// slow, full or failing disk behind it.
#ifndef EFLA_SERVER_SESSIONS_FILE_OPS_H_
#define EFLA_SERVER_SESSIONS_FILE_OPS_H_

#include <cstddef>
#include <string>

namespace efla {

// Every call returns 0 (or what it says) on success and a negative errno on failure. Thread-safe.
class FileOps {
 public:
  virtual ~FileOps() = default;
  // A new file for writing, mode 0600; EEXIST when there is one. The descriptor.
  virtual int Create(const std::string& path);
  virtual int OpenToRead(const std::string& path);
  // Bytes written or read, possibly fewer than asked; a read of 0 is the end.
  virtual long Write(int fd, const void* bytes, size_t count);
  virtual long Read(int fd, void* bytes, size_t count);
  virtual int SyncData(int fd);  // fdatasync
  virtual int Close(int fd);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Unlink(const std::string& path);
  // Makes the folder's entries durable.
  virtual int SyncFolder(const std::string& folder);
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_FILE_OPS_H_
