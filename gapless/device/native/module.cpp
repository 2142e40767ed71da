// The Python names of graphs, streams and fences.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "stream.h"

namespace gapless {
namespace {

bool has_place(py::handle value, py::handle place) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) return false;
  for (py::handle item : value)
    if (py::isinstance(item, place)) return true;
  return false;
}

Argument argument(py::handle value, const c10::TypePtr& type, py::handle place) {
  Argument found;
  if (py::isinstance(value, place)) {
    found.place = value.cast<int64_t>();
  } else if (has_place(value, place)) {
    const auto& element = type->expectRef<c10::ListType>().getElementType();
    found.optional = element->kind() == c10::TypeKind::OptionalType;
    for (py::handle item : value) found.items.push_back(argument(item, element, place));
  } else {
    torch::jit::ToIValueAllowNumbersAsTensors allow(true);
    found.constant = torch::jit::toIValue(value, type);
  }
  return found;
}

// Marks the last use of `place` among the arguments; false if they do not use it.
bool mark_last(std::vector<Argument>& arguments, int64_t place) {
  for (auto it = arguments.rbegin(); it != arguments.rend(); ++it) {
    if (mark_last(it->items, place)) return true;
    if (it->place == place) return it->last = true;
  }
  return false;
}

int64_t place_or_none(py::handle value) { return value.is_none() ? -1 : value.cast<int64_t>(); }

// One gapless.device.record.Call.
void add(Graph& graph, const std::string& name, const std::string& overload, const py::tuple& args,
         const py::object& results, const std::vector<int64_t>& drops, py::handle place) {
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  Operation operation{handle, {}, {}, {}};
  const auto& schema = handle.schema();
  for (size_t i = 0; i < args.size(); ++i)
    operation.arguments.push_back(argument(args[i], schema.arguments()[i].type(), place));
  const size_t count = schema.returns().size();
  for (size_t i = 0; i < count; ++i) {
    py::object result = count > 1 ? py::object(results[py::int_(i)]) : results;
    const bool unpacks = py::isinstance<py::tuple>(result);
    std::vector<int64_t> places;
    if (unpacks)
      for (py::handle item : result) places.push_back(place_or_none(item));
    else
      places.push_back(place_or_none(result));
    operation.results.push_back(std::move(places));
    operation.unpacks.push_back(unpacks);
  }
  for (int64_t dropped : drops)
    if (!mark_last(operation.arguments, dropped))
      for (auto& places : operation.results) std::replace(places.begin(), places.end(), dropped, int64_t{-1});
  graph.add(std::move(operation));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<std::string, size_t>())
      .def("add", &add)
      .def(
          "run", [](const Graph& g) { g.run(false); }, py::call_guard<py::gil_scoped_release>());
  py::class_<Hub, std::shared_ptr<Hub>>(m, "Hub").def(py::init<py::object>()).def("fail", &Hub::fail);
  py::class_<Bell, std::shared_ptr<Bell>>(m, "Bell")
      .def(py::init<std::shared_ptr<Hub>>())
      .def("ring", &Bell::ring)
      .def("clear", &Bell::clear)
      .def("wait", &Bell::wait, py::arg("seconds"))
      .def_property_readonly("rung", &Bell::rung);
  py::class_<Fence, std::shared_ptr<Fence>>(m, "Fence")
      .def("done", &Fence::done)
      .def("wait", &Fence::wait, py::arg("bell") = nullptr)
      .def("time", &Fence::time)
      .def_property(
          "mark", [](const Fence& f) { return f.mark ? f.mark : py::none(); },
          [](Fence& f, py::object mark) { f.mark = mark.is_none() ? py::object() : std::move(mark); });
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def(py::init<std::shared_ptr<Hub>, py::object, py::object>())
      .def("put", [](Stream& s, py::object program, py::object args) { s.put(Program{std::move(program), std::move(args)}); })
      .def("replay", [](Stream& s, std::shared_ptr<Graph> graph) { s.put(Replay{std::move(graph)}); })
      .def(
          "copy",
          [](Stream& s, const at::Tensor& to, const at::Tensor& from) {
            s.put(Copy{to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), to.storage(), from.storage()});
          })
      .def("record", &Stream::record)
      .def("after", [](Stream& s, std::shared_ptr<Fence> fence) { s.put(Await{std::move(fence)}); })
      .def("stop", [](Stream& s) { s.put(Stop{}); })
      .def("work", &Stream::work);
}

}  // namespace gapless
