// torch's operators on the simulated devices.
//
// A device's memory is memory of the host, so an operator can be computed by its CPU implementation on tensors that alias
// it. torch's dispatcher lets us do that for all operators at once: each that has an implementation for CUDA and one for
// the CPU gets this function in place of the former. It
//
// - allocates the results from torch's own CUDA caching allocator. Their shapes are those that the CPU implementation
//   gives for zeros in the arguments' shapes, which is remembered by the arguments' signature;
// - queues the computation on torch's current stream, with raw pointers, and returns at once. So work that lacks an event
//   or whose memory was given back too early is wrong, as on a card.
//
// An operator whose result the host must see (`nonzero`, `equal`, `index` with a mask) waits for the stream, as on a card.
// Random numbers come from torch's CUDA generator: its seed and offset begin a CPU generator for each call.
// What has no CPU implementation stays with torch's own code, whose kernels runtime.cpp refuses by name.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "device.h"

namespace sim = simulated;
using at::IValue;
using at::Tensor;
using torch::jit::Stack;

namespace {

// ---- arguments ----

// Apply a function to every tensor in a value.
template <typename Function>
IValue mapped(const IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? function(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(function(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <typename Function>
void for_each_tensor(const IValue& value, const Function& function) {
  mapped(value, [&](const Tensor& tensor) {
    function(tensor);
    return tensor;
  });
}

// The same memory as a CPU tensor. It holds no reference, as a kernel holds none.
Tensor alias(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  Tensor made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options().device(at::kCPU));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// Numbers of the host beside tensors of the device are read when the operator is called.
Tensor number_now(const Tensor& tensor) {
  if (tensor.is_cuda()) return tensor;
  Tensor read = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) read.unsafeGetTensorImpl()->set_wrapped_number(true);
  return read;
}

Tensor zeros_like_in_shape(const Tensor& tensor) {
  if (!tensor.is_cuda()) return number_now(tensor);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
}

// ---- shapes of results ----

struct Shape {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  bool defined;
};

Shape shape_of(const Tensor& tensor) {
  if (!tensor.defined()) return {{}, {}, at::kFloat, false};
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), true};
}

// Results in the order in which the operator returns them, lists in one piece.
using Shapes = std::vector<std::vector<Shape>>;

void describe(std::string& text, const IValue& value) {
  bool tensors = false;
  for_each_tensor(value, [&](const Tensor& tensor) {
    tensors = true;
    text += tensor.is_cuda() ? 'd' : 'h';
    text += std::to_string((int)tensor.scalar_type());
    text += tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't';
    for (const auto size : tensor.sizes()) (text += std::to_string(size)) += ',';
    text += '/';
    for (const auto stride : tensor.strides()) (text += std::to_string(stride)) += ',';
    text += ';';
  });
  if (tensors) return;
  if (value.isInt())
    text += std::to_string(value.toInt());
  else if (value.isBool())
    text += value.toBool() ? 'T' : 'F';
  else if (value.isIntList())
    for (const auto number : value.toIntVector()) (text += std::to_string(number)) += ',';
  else if (value.isBoolList())
    for (const bool flag : value.toBoolList()) text += flag ? 'T' : 'F';
  else if (value.isString())
    text += value.toStringRef();
  else
    text += value.tagKind();  // a float decides no shape, but that of a range
  text += ';';
}

Stack call(const c10::OperatorHandle& op, Stack stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
  return stack;
}

// Shapes of the results for arguments like these; null if zeros are no valid arguments.
const Shapes* shapes_for(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::unique_ptr<Shapes>>;
  std::string signature = toString(op.operator_name()) + ":";
  const bool is_range = signature.rfind("aten::arange", 0) == 0 || signature.rfind("aten::range", 0) == 0;
  for (const IValue& argument : arguments) {
    describe(signature, argument);
    if (is_range && argument.isDouble()) signature += std::to_string(argument.toDouble());
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known->find(signature);
    if (found != known->end()) return found->second.get();
  }
  Stack zeros;
  for (const IValue& argument : arguments)
    zeros.push_back(argument.isGenerator() ? IValue(at::detail::createCPUGenerator(0)) : mapped(argument, zeros_like_in_shape));
  std::unique_ptr<Shapes> shapes;
  try {
    shapes = std::make_unique<Shapes>();
    for (const IValue& result : call(op, std::move(zeros))) {
      shapes->emplace_back();
      for_each_tensor(result, [&](const Tensor& tensor) { shapes->back().push_back(shape_of(tensor)); });
      if (result.isTensor() && !result.toTensor().defined()) shapes->back().push_back(shape_of(Tensor()));
    }
  } catch (const std::exception& error) {
    if (sim::setting("LOG", 0)) fprintf(stderr, "simulated CUDA: no shapes for %s: %.300s\n", signature.c_str(), error.what());
    shapes = nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex);
  return ((*known)[signature] = std::move(shapes)).get();
}

Tensor on_device(const Shape& shape, c10::Device device) {
  if (!shape.defined) return {};
  return at::empty_strided(shape.sizes, shape.strides, at::TensorOptions(shape.type).device(device));
}

// ---- computing ----

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// A result that is an argument, by the names that the schema gives memory: `Tensor(a!) self` and `-> Tensor(a!)`.
int argument_of_result(const c10::FunctionSchema& schema, const c10::Argument& result) {
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (is_written(schema.arguments()[i]) && schema.arguments()[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
      return (int)i;
  return -1;
}

void fit(const Tensor& tensor, const Shape& shape) {
  if (tensor.sizes() == at::IntArrayRef(shape.sizes)) return;
  tensor.resize_(shape.sizes);
  tensor.as_strided_(shape.sizes, shape.strides);
}

// The device that all tensors are on. Numbers of the host may stand beside them.
std::optional<c10::Device> device_of(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least "
                  "two devices, ", device->str(), " and ", tensor.device().str(), " in ", op.operator_name());
      device = tensor.device();
    });
  const std::string& name = op.operator_name().name;
  const bool takes_host_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  for (const IValue& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& tensor) {
      TORCH_CHECK(!device || tensor.is_cuda() || tensor.dim() == 0 || takes_host_indices || tensor.is_meta(), "Expected all "
                  "tensors to be on the same device, but found at least two devices, ", device->str(), " and cpu in ",
                  op.operator_name());
    });
  return device;
}

at::Generator generator_for_call(const IValue& given, c10::Device device) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  if (given.isGenerator() && given.toGenerator().defined()) generator = given.toGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto [seed, offset] = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_engine_inputs(4);
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

// Compute on the stream: the arguments' memory is read, and the results' written, when the stream gets there.
void compute(const c10::OperatorHandle& op, Stack arguments, std::vector<IValue> results, c10::cuda::CUDAStream stream) {
  for (IValue& argument : arguments) argument = mapped(argument, alias);
  for (IValue& result : results) result = mapped(result, alias);
  sim::enqueue((sim::Stream*)sim::stream_of(stream.stream()), [op, arguments = std::move(arguments), results = std::move(results)] {
    try {
      c10::InferenceMode no_autograd;
      Stack computed = call(op, arguments);
      for (size_t i = 0; i < results.size(); i++) {
        if (results[i].isNone()) continue;  // it is an argument
        std::vector<Tensor> from, into;
        for_each_tensor(computed[i], [&](const Tensor& tensor) { from.push_back(tensor); });
        for_each_tensor(results[i], [&](const Tensor& tensor) { into.push_back(tensor); });
        for (size_t j = 0; j < into.size(); j++) into[j].copy_(from[j]);
      }
    } catch (const std::exception& error) {
      sim::fail_device(sim::LAUNCH_FAILURE, toString(op.operator_name()) + " failed on the device: " + error.what());
      fprintf(stderr, "simulated CUDA: %s\n", sim::failure_text().c_str());
    }
  });
}

// Wait for the stream, compute at once, and bring the results to the device.
void compute_now(const c10::OperatorHandle& op, Stack& arguments, Stack* stack, c10::cuda::CUDAStream stream, c10::Device device) {
  sim::count("waits of " + op.operator_name().name);
  if (sim::setting("LOG", 0)) fprintf(stderr, "simulated CUDA: waits for %s\n", toString(op.operator_name()).c_str());
  stream.synchronize();
  const auto& schema = op.schema();
  Stack on_host;
  for (size_t i = 0; i < arguments.size(); i++)
    // An output that may be resized is a copy.
    on_host.push_back(mapped(arguments[i], [&](const Tensor& tensor) {
      return is_written(schema.arguments()[i]) ? alias(tensor).clone() : alias(tensor);
    }));
  Stack computed = call(op, on_host);
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_written(schema.arguments()[i])) continue;
    std::vector<Tensor> from;
    for_each_tensor(on_host[i], [&](const Tensor& tensor) { from.push_back(tensor); });
    size_t next = 0;
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      fit(tensor, shape_of(from[next]));
      alias(tensor).copy_(from[next++]);
    });
  }
  for (size_t i = 0; i < computed.size(); i++) {
    const auto& result = schema.returns()[i];
    if (result.alias_info() && result.alias_info()->isWrite())
      stack->push_back(arguments[argument_of_result(schema, result)]);
    else
      stack->push_back(mapped(computed[i], [&](const Tensor& tensor) {
        Tensor made = on_device(shape_of(tensor), device);
        alias(made).copy_(tensor);
        return made;
      }));
  }
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto& type = *result.type();
    if (type.kind() != c10::TypeKind::TensorType && !type.isSubtypeOf(*c10::ListType::ofTensors())) return false;
  }
  return true;
}

bool depends_on_data(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!returns_only_tensors(op.schema())) return true;
  if (!op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output)) return false;
  if (op.operator_name().name != "aten::index") return true;
  bool masks = false;
  for_each_tensor(arguments[1], [&](const Tensor& index) { masks |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte; });
  return masks;
}

void simulate(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  stack->erase(stack->end() - schema.arguments().size(), stack->end());
  const auto device = device_of(op, arguments);
  if (!device) {  // a factory whose device is an argument: nothing to read, so the host may compute it
    TORCH_CHECK(false, "nothing simulates ", toString(op.operator_name()), " without a tensor on the device");
  }
  const c10::cuda::CUDAGuard guard(*device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device->index());
  if (const int status = sim::called(op.operator_name().name.c_str()))
    TORCH_CHECK(false, "CUDA error: an injected fault at ", toString(op.operator_name()), ", status ", status);
  if (sim::device_failure()) TORCH_CHECK(false, "CUDA error: ", sim::failure_text());
  sim::count("operators");
  for (size_t i = 0; i < arguments.size(); i++) {
    arguments[i] = mapped(arguments[i], number_now);
    if (schema.arguments()[i].type()->str().rfind("Generator", 0) == 0) arguments[i] = generator_for_call(arguments[i], *device);
  }
  const bool now = depends_on_data(op, arguments);
  bool fresh = false;  // some results are new memory, or an output may need another size
  for (const auto& result : schema.returns()) fresh |= !is_written(result);
  for (const auto& argument : schema.arguments()) fresh |= argument.is_out();
  const Shapes* shapes = fresh && !now ? shapes_for(op, arguments) : nullptr;
  if (now || (fresh && !shapes)) return compute_now(op, arguments, stack, stream, *device);
  for (size_t i = 0; i < arguments.size(); i++)  // as torch's own kernels for lists do
    if (is_written(schema.arguments()[i]) && arguments[i].isTensorList())
      for_each_tensor(arguments[i], [](const Tensor& tensor) {
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      });
  std::vector<IValue> results;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto& result = schema.returns()[i];
    if (is_written(result)) {
      const IValue& argument = arguments[argument_of_result(schema, result)];
      if (fresh && argument.isTensor()) fit(argument.toTensor(), (*shapes)[i][0]);
      results.emplace_back();
      stack->push_back(argument);
    } else if (result.type()->kind() == c10::TypeKind::TensorType) {
      results.emplace_back(on_device((*shapes)[i][0], *device));
      stack->push_back(results.back());
    } else {
      c10::List<Tensor> list;
      for (const Shape& shape : (*shapes)[i]) list.push_back(on_device(shape, *device));
      results.emplace_back(list);
      stack->push_back(list);
    }
  }
  compute(op, arguments, std::move(results), stream);  // a temporary argument is given back only once this is queued
}

// ---- operators that are not simply computed ----

// Within a device it is an operator like any other. Between devices, or with the host, torch's own code comes down to
// cudaMemcpyAsync, with operators before and after it.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.device() != source.device()) return at::native::copy_(self, source, non_blocking);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{self, source, non_blocking};
  simulate(op, &stack);
  return self;
}

// On the CPU it takes the default generator, which belongs to the script.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input, at::empty_strided(input.sizes(), input.strides(), input.options().dtype(at::kBool)).fill_(true)};
  Tensor mask = at::empty_strided(input.sizes(), input.strides(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p < 1 ? 1 / (1 - p) : 0), mask};
}

// ---- registration ----

// They only describe memory, or read it by cudaMemcpyAsync.
const std::unordered_set<std::string> torchs_own = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::as_strided", "aten::view", "aten::unfold",
    "aten::_reshape_alias", "aten::_local_scalar_dense", "aten::is_set_to", "aten::record_stream", "aten::copy_",
    "aten::native_dropout", "aten::view_as_real", "aten::view_as_complex", "aten::is_pinned", "aten::_pin_memory",
    "aten::_fused_sdp_choice", "aten::_cudnn_init_dropout_state", "aten::_dirichlet_grad"};

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type.find("Tensor") != std::string::npos) return true;
  }
  return false;
}

bool returns_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// Memory that torch's allocator takes back is poisoned in the order of its stream, so that a late reader sees NaN.
void poison(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED) return;
  const c10::cuda::CUDAGuard guard(entry.device_);
  void* pointer = (void*)entry.addr_;
  const size_t bytes = entry.size_;
  sim::enqueue((sim::Stream*)sim::stream_of((void*)entry.stream_), [=] { memset(pointer, sim::POISON, bytes); });
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct AtExit {
  ~AtExit() { sim::stop_streams(); }
};

}  // namespace

// Called once torch is imported.
EXPORTED int simulate_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static const AtExit at_exit;
  Silent silent;  // about each operator that is replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  int registered = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || torchs_own.count(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    if (!takes_tensors(op->schema()) || returns_views(op->schema())) continue;
    const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&simulate>());
    registered++;
  }
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("native_dropout", TORCH_FN(native_dropout));
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return registered;
}

// Called once devices are in use, since the allocator exists only then.
EXPORTED void poison_freed_memory() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(poison); }
