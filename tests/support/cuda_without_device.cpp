// A CUDA that is there and does nothing: torch then holds tensors without data on "cuda", records no events, and has
// two devices, each with one stream. Where torch was built with CUDA, this stands before what it has of its own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kind = c10::DeviceType::CUDA;
constexpr DeviceIndex devices = 2;
thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kind> {
  Device getDevice() const override { return Device(kind, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device exchangeDevice(Device device) const override {
    Device before(kind, current);
    current = device.index();
    return before;
  }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return Stream(Stream::DEFAULT, stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

const Guard guard;

}  // namespace

// To be called once torch is there, whose own guard would replace one from before.
extern "C" void install_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kind)].store(&guard);
}


namespace at {

struct HooksWithoutDevice : CUDAHooksInterface {
  explicit HooksWithoutDevice(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return devices; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, HooksWithoutDevice)

}  // namespace at
