// The names for Python, and the hooks through which torch finds the device.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "fake.h"

namespace gapless::fake {
namespace {

namespace py = pybind11;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check_device({kFake, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    setCurrentDevice(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(c10::default_rng_seed_val); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

void capture_begin(Graph& graph, std::optional<PoolId> pool, const std::string& mode) {
  TORCH_CHECK(mode == "thread_local" || mode == "relaxed", "capture_error_mode is thread_local or relaxed, not ", mode);
  graph.capture_begin(pool.value_or(PoolId{0, 0}), mode == "relaxed");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // torch keeps it to the end
  register_allocators();
  m.def("register_graphs", &register_graphs);  // under the name that the backend has got
  // Whether this is the accelerator that torch pins memory of the host for.
  m.def("pins", [] { return is_pinned(at::empty({1}, at::TensorOptions().pinned_memory(true)).storage().data()); });
  m.def("generator", &default_generator);
  m.def("default_stream", [] { return c10::Stream(c10::Stream::DEFAULT, device()); });
  m.def("delay", &delay);
  m.def("hold", [](bool held) {
    for (Stream* stream : all_streams()) stream->hold(held);
  });
  m.def("drain", &synchronize_device);
  m.def("reset", &reset);
  m.def("shut_down", &shut_down);
  m.def("graph_pool_handle", &new_pool);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &capture_begin, py::arg("pool") = py::none(), py::arg("capture_error_mode") = "thread_local")
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool);
}

}  // namespace gapless::fake
