#include "kernels/create_device.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/cpu/cpu_device.h"

namespace efla {
namespace {

constexpr char kCudaModule[] = "libefla_cuda.so";

// Where the module may lie: beside the program (a build, a container), in ../lib of it (an installation), and
// wherever the dynamic loader looks.
absl::StatusOr<void*> OpenCudaModule() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& folder : {program, program / ".." / "lib"}) {
    const fs::path file = folder / kCudaModule;
    if (!fs::exists(file, error)) continue;
    if (void* module = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return module;
    return absl::UnavailableError(absl::StrFormat("cannot open the CUDA module: %s", dlerror()));
  }
  if (void* module = dlopen(kCudaModule, RTLD_NOW | RTLD_LOCAL)) return module;
  return absl::NotFoundError(absl::StrFormat(
      "device cuda: this build has no CUDA module (%s is neither in %s, nor in ../lib of it, nor "
      "where the loader looks: %s); build with -DEFLA_CUDA=ON or choose device cpu",
      kCudaModule, program.string(), dlerror()));
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal) {
  using VersionFunction = int();
  using CreateFunction = Device*(int, DeviceStatus*);
  const absl::StatusOr<void*> module = OpenCudaModule();
  if (!module.ok()) return module.status();
  auto* version = reinterpret_cast<VersionFunction*>(dlsym(*module, "efla_cuda_module_version"));
  auto* create = reinterpret_cast<CreateFunction*>(dlsym(*module, "efla_create_cuda_device"));
  if (version == nullptr || create == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat("%s is not a module of this server", kCudaModule));
  }
  if (version() != kDeviceAbiVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s has interface version %d; this program needs %d: install both from one build",
                        kCudaModule, version(), kDeviceAbiVersion));
  }
  DeviceStatus status;
  std::unique_ptr<Device> device(create(ordinal, &status));  // the module stays open for good
  if (device == nullptr) {
    if (status.ok()) return absl::InternalError("the CUDA module returned neither a device nor an error");
    return ToStatus(status);
  }
  return device;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCpuDevice(const DeviceOptions& options) {
  if (options.threads < 0 || options.threads > kMaxCpuThreads) {
    return absl::InvalidArgumentError(
        absl::StrFormat("threads is %d; the range is 0 to %d", options.threads, kMaxCpuThreads));
  }
  return CreateCpuDevice(options.threads);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options) {
  if (options.kind == "cpu") return OpenCpuDevice(options);
  if (options.kind != "cuda" && options.kind != "auto") {
    return absl::InvalidArgumentError(
        absl::StrFormat("device is \"%s\"; the choices are auto, cpu, cuda", options.kind));
  }
  if (options.ordinal < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("GPU ordinal is %d; the least is 0", options.ordinal));
  }
  absl::StatusOr<std::unique_ptr<Device>> cuda = CreateCudaDevice(options.ordinal);
  if (cuda.ok() || options.kind == "cuda") return cuda;
  return OpenCpuDevice(options);
}

absl::Status ToStatus(const DeviceStatus& status) {
  switch (status.code) {
    case DeviceStatus::Code::kOk:
      return absl::OkStatus();
    case DeviceStatus::Code::kOutOfMemory:
      return absl::ResourceExhaustedError(status.message);
    case DeviceStatus::Code::kUnavailable:
      return absl::UnavailableError(status.message);
    case DeviceStatus::Code::kInvalid:
      return absl::InvalidArgumentError(status.message);
    case DeviceStatus::Code::kInternal:
      break;
  }
  return absl::InternalError(status.message);
}

}  // namespace efla
