// Graphs: work of a stream that is recorded once, and replayed as one piece.
#include "fake.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define GAPLESS_FAKE_ACCELERATOR_GRAPH
#endif

namespace gapless::fake {
namespace {

thread_local Stream* captured = nullptr;  // by this thread

}  // namespace

void spoil(Stream& stream, const std::string& why) {
  const std::string error = "operation not permitted when stream is capturing: " + why;
  if (auto capture = stream.capture(); capture && capture->error.empty()) capture->error = error;
  TORCH_CHECK(false, error);
}

void forbid_capture(Stream* stream, const char* what) {
  if (stream != nullptr && stream->capture()) spoil(*stream, what);
  if (captured == nullptr) return;
  const auto capture = captured->capture();
  if (!capture) captured = nullptr;  // the graph was reset meanwhile
  if (capture && !capture->relaxed) spoil(*captured, what);
}

PoolId new_pool() {
  static std::atomic<unsigned long long> last{0};
  return {0, ++last};
}

Graph::~Graph() { reset(); }

void Graph::capture_begin(PoolId pool, bool relaxed) {
  check();
  TORCH_CHECK(!capture_ && !tasks_, "this graph has been captured: reset it first");
  TORCH_CHECK(captured == nullptr, "this thread is already capturing a graph");
  Stream& stream = current();
  TORCH_CHECK(stream.id() != 0, "cannot capture on the default stream: use another one");
  TORCH_CHECK(!stream.capture(), "the stream is already captured");
  pool_ = pool == PoolId{0, 0} ? new_pool() : pool;
  retain_pool(pool_);
  capture_ = std::make_shared<Capture>(pool_, relaxed);
  stream_ = captured = &stream;
  stream.capture(capture_);
}

void Graph::capture_end() {
  TORCH_CHECK(capture_, "this graph is not being captured");
  TORCH_CHECK(captured == stream_, "another thread began the capture");
  stream_->capture(nullptr);
  captured = nullptr;
  auto capture = std::exchange(capture_, nullptr);
  if (!capture->error.empty()) {
    reset();
    TORCH_CHECK(false, "the capture failed: ", capture->error);
  }
  tasks_ = std::make_shared<const std::vector<Task>>(std::move(capture->tasks));
}

void Graph::replay() {
  TORCH_CHECK(tasks_, "replay before the end of a capture");
  current().submit([tasks = tasks_] {
    for (const Task& task : *tasks) task();
  });
}

void Graph::reset() {
  if (capture_) {
    stream_->capture(nullptr);
    if (captured == stream_) captured = nullptr;
  }
  capture_ = nullptr;
  tasks_ = nullptr;
  if (stream_ != nullptr) release_pool(pool_);
  stream_ = nullptr;
}

#ifdef GAPLESS_FAKE_ACCELERATOR_GRAPH

namespace {

struct AcceleratorGraph final : at::GraphImplInterface {
  explicit AcceleratorGraph(const at::GraphImplArgs&) {}
  void capture_begin(PoolId pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(mode != at::GraphCaptureMode::Global, "the fake device captures by thread: use thread_local or relaxed");
    graph.capture_begin(pool, mode == at::GraphCaptureMode::Relaxed);
  }
  void capture_end() override { graph.capture_end(); }
  void instantiate() override {}
  void replay() override { graph.replay(); }
  void reset() override { graph.reset(); }
  PoolId pool() const override { return graph.pool(); }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK(false, "the fake device dumps no graphs"); }
  Graph graph;
};

}  // namespace

void register_graphs() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kFake, false), [](const at::GraphImplArgs& args) {
    return std::unique_ptr<at::GraphImplInterface>(std::make_unique<AcceleratorGraph>(args));
  });
}

#else

void register_graphs() {}

#endif

}  // namespace gapless::fake
