// A CUDA device for a CPU build of torch: its tensors say `cuda:0`, and their memory is the machine's own.
//
// Every operation on them runs by its CPU kernel, on aliases of the same memory. On the way it is reported to a listener as
// CUDA would see it: a launch, a copy up, down or across, or a wait for the device. What CUDA refuses is refused: tensors
// of two devices in one operation, and waits and copies while a graph is captured. A captured graph holds operations, and
// runs them again on the same tensors.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <set>

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Storage, c10::StorageImpl, c10::Stream;
using Keys = c10::DispatchKeySet;

namespace {

constexpr DeviceIndex DEVICES = 2;
thread_local DeviceIndex current = 0;

enum Event { LAUNCH, FREE, UP, DOWN, ACROSS, WAIT, SCALAR, REFUSED };
void (*listener)(const char* operation, int event, long bytes, long flops) = nullptr;
void report(const std::string& operation, Event event, long bytes = 0, long flops = 0) {
  if (listener) listener(operation.c_str(), event, bytes, flops);
}
[[noreturn]] void refuse(const std::string& operation, const std::string& why) {
  report(operation, REFUSED);
  TORCH_CHECK(false, "twin: ", operation, ": ", why);
}

// -------- The device that torch asks for: one stream, whose work is always done

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device device) const override { if (device.has_index()) current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.has_index()) current = device.index(); }
  Device exchangeDevice(Device device) const override { Device old = getDevice(); setDevice(device); return old; }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
};
const c10::impl::DeviceGuardImplRegistrar guard_registered(c10::DeviceType::CUDA, new Guard());

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index < 0 ? current : index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  // Draws are those of a CPU, so that runs on both can be compared.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// -------- Memory: a storage of the device holds the CPU storage whose memory it is

std::atomic<long> bytes_held{0}, most_bytes_held{0};

struct Held {
  Storage cpu;
  long bytes;
  explicit Held(const Storage& storage) : cpu(storage), bytes(static_cast<long>(storage.nbytes())) {
    long now = bytes_held += bytes, most = most_bytes_held;
    while (now > most && !most_bytes_held.compare_exchange_weak(most, now)) {}
  }
  ~Held() { bytes_held -= bytes; }
  static Held& of(const StorageImpl& cuda) { return *static_cast<Held*>(cuda.data_ptr().get_context()); }
};
c10::DataPtr on_device(const Storage& cpu, DeviceIndex index) {
  return c10::DataPtr(cpu.mutable_data(), new Held(cpu), [](void* held) { delete static_cast<Held*>(held); }, Device(c10::kCUDA, index));
}
Storage resizable(size_t bytes, c10::DataPtr data, c10::Allocator* allocator) {
  return Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator, true));
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = c10::GetCPUAllocator();
    return on_device(resizable(bytes, memory->allocate(bytes), memory), current);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
const bool allocator_set = (c10::SetAllocator(c10::kCUDA, &allocator, 200), true);

Tensor tensor_like(const Tensor& like, Storage storage, Keys keys, bool view) {
  Tensor made = view ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype())
                     : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}
Tensor alias_of(const Tensor& cuda) {
  return tensor_like(cuda, Held::of(*cuda.storage().unsafeGetStorageImpl()).cpu, Keys(c10::DispatchKey::CPU), false);
}
// Bytes that are read or written: an expanded tensor has no more than its storage.
long size_of(const Tensor& tensor) { return std::min(static_cast<long>(tensor.numel() * tensor.element_size()), static_cast<long>(tensor.storage().nbytes())); }

// Apply `change` to every tensor in a value, lists of tensors included.
template <class Change> IValue mapped(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) list.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
    c10::List<std::vector<Tensor>> lists;
    for (const IValue& each : value.toListRef()) lists.push_back(mapped(each, change).toTensorVector());
    return lists;
  }
  return value;
}

// Most bytes of an operation that is computed; less than everything where counts alone are asked for.
constexpr long EVERYTHING = std::numeric_limits<long>::max();
long most_computed = EVERYTHING;

// What is not computed is zero, in memory that takes no room until it is written.
Tensor zeros_in_place_of(const Tensor& made) {
  auto* storage = made.storage().unsafeGetStorageImpl();
  void* zeros = std::calloc(std::max<size_t>(storage->nbytes(), 1), 1);
  storage->set_data_ptr_noswap({zeros, zeros, &std::free, Device(c10::kCPU)});
  return made;
}

// -------- One operation: its arguments as aliases on the CPU, and what came of it back on the device

struct Call {
  std::vector<std::pair<Tensor, Tensor>> aliases;  // (on the device, on the CPU)
  std::vector<std::pair<Storage, Storage>> storages;
  int on_cpu = 0, unwrapped_scalars = 0;
  DeviceIndex index = -1;
  bool two_devices = false, names_a_device = false;

  Tensor down(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim()) ++on_cpu;
      else if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) ++unwrapped_scalars;
      return tensor;
    }
    two_devices |= index >= 0 && index != tensor.get_device();
    if (index < 0) index = tensor.get_device();
    for (auto& [cuda, cpu] : aliases) if (cuda.is_same(tensor)) return cpu;
    aliases.emplace_back(tensor, alias_of(tensor));
    return aliases.back().second;
  }
  IValue down(const IValue& value) {
    if (value.isDevice()) {
      names_a_device = true;
      if (!value.toDevice().is_cuda()) return value;
      if (index < 0 && value.toDevice().has_index()) index = value.toDevice().index();
      return Device(c10::kCPU);
    }
    if (value.isStorage() && value.toStorage().device_type() == c10::kCUDA) {
      storages.emplace_back(Held::of(*value.toStorage().unsafeGetStorageImpl()).cpu, value.toStorage());
      return storages.back().first;
    }
    return mapped(value, [this](const Tensor& tensor) { return down(tensor); });
  }
  Storage storage_of(const Storage& cpu) {
    for (auto& [mine, cuda] : storages) if (mine.is_alias_of(cpu)) return cuda;
    for (auto& [cuda, mine] : aliases) if (mine.storage().is_alias_of(cpu) && cpu.unsafeGetStorageImpl() == mine.storage().unsafeGetStorageImpl()) return cuda.storage();
    return resizable(cpu.nbytes(), on_device(cpu, index < 0 ? current : index), &allocator);
  }
  Tensor up(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != c10::kStrided) return tensor;
    for (auto& [cuda, cpu] : aliases) if (cpu.is_same(tensor)) return cuda;
    for (auto& [cuda, cpu] : aliases)
      if (cpu.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) return tensor_like(tensor, cuda.storage(), cuda.key_set(), true);
    return tensor_like(tensor, storage_of(tensor.storage()), Keys(c10::DispatchKey::CUDA), false);
  }
  void take_over() {  // sizes, memory and storages that the operation has changed
    for (auto& [cuda, cpu] : aliases) {
      auto* storage = cuda.storage().unsafeGetStorageImpl();
      if (Held::of(*storage).cpu.unsafeGetStorageImpl() != cpu.storage().unsafeGetStorageImpl()) {
        cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_of(cpu.storage()));
      } else if (storage->data_ptr().get() != cpu.storage().data_ptr().get() || storage->nbytes() != cpu.storage().nbytes()) {
        storage->set_data_ptr_noswap(on_device(cpu.storage(), cuda.get_device()));
        storage->set_nbytes(cpu.storage().nbytes());
      }
      if (cuda.sizes() != cpu.sizes() || cuda.strides() != cpu.strides() || cuda.storage_offset() != cpu.storage_offset())
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

struct Recorded { c10::OperatorHandle operation; std::vector<IValue> arguments; std::vector<Tensor> results; };
using Graph = std::vector<Recorded>;
std::map<long, Graph> graphs;
thread_local Graph* capturing = nullptr;

const std::set<std::string> WAITS = {"_local_scalar_dense", "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique", "_unique2",
  "unique_consecutive", "unique_dim", "unique_dim_consecutive", "bincount", "histc", "equal", "repeat_interleave.Tensor"};
const std::set<std::string> WITHOUT_A_KERNEL = {"empty.memory_format", "empty_strided", "resize_", "set_", "set_.source_Storage",
  "set_.source_Storage_storage_offset", "set_.source_Tensor", "record_stream", "is_set_to", "_efficientzerotensor", "_fused_sdp_choice"};

// What these read of their first tensor is as long as what they return.
const std::set<std::string> GATHERS = {"embedding", "gather", "gather.out", "index.Tensor", "index.Tensor_out", "index_select"};

// Floating-point operations of a product; K is what is summed over.
long flops_of(const std::string& name, const std::vector<IValue>& given, const Tensor& out) {
  const std::set<std::string> first = {"mm", "mm.out", "bmm", "bmm.out", "linear", "_grouped_mm"}, second = {"addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm_", "addbmm"};
  if (!first.count(name) && !second.count(name)) return 0;
  const Tensor a = given[second.count(name)].toTensor();
  const long groups = name == "_grouped_mm" && out.dim() == 3 && a.dim() == 2 ? out.size(0) : 1;  // each sums over a part
  return 2 * out.numel() * a.size(-1) / groups;
}

bool by_truth_values(const IValue& indices) {
  for (const auto& each : indices.toOptionalTensorVector())
    if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

void run(const c10::OperatorHandle& operation, c10::Stack* stack) {
  const auto& schema = operation.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  std::vector<IValue> given(stack->end() - schema.arguments().size(), stack->end());
  torch::jit::drop(*stack, given.size());
  Call call;
  c10::Stack inside;
  for (const IValue& value : given) inside.push_back(call.down(value));
  bool writes = false, views = false;
  for (const auto& argument : schema.arguments()) writes |= argument.alias_info() && argument.alias_info()->isWrite();
  for (const auto& result : schema.returns()) views |= result.alias_info() != nullptr;

  // What this is to a CUDA device.
  Event event = LAUNCH;
  long bytes = 0;
  const bool indexes = name.rfind("index.", 0) == 0 || name == "_index_put_impl_";
  if (name == "copy_") {
    const Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
    if (to.is_cuda() && from.is_cuda()) event = to.device() == from.device() ? LAUNCH : ACROSS;
    else event = to.is_cuda() ? UP : DOWN;
    bytes = size_of(to) * (event == LAUNCH ? 2 : 1);
  } else if (WITHOUT_A_KERNEL.count(name) || (views && !writes)) {
    event = FREE;
  } else {
    if (!call.aliases.empty() && call.on_cpu && !indexes) refuse(name, "Expected all tensors to be on the same device");
    if (call.two_devices) refuse(name, "tensors of two CUDA devices");
    // One value for what a mask chooses needs no count of it.
    const bool counts = indexes && by_truth_values(given[1]) && !(name[0] == '_' && given[2].toTensor().numel() == 1);
    if (WAITS.count(name) || counts) event = WAIT;
    if (indexes && call.on_cpu) report(name, UP);
    if (call.unwrapped_scalars && !call.aliases.empty()) report(name, SCALAR);
    for (auto& [cuda, cpu] : call.aliases) bytes += size_of(cpu);
    if (GATHERS.count(name) && given[0].toTensor().is_cuda()) bytes -= size_of(given[0].toTensor());
    for (size_t k = 0; k < given.size(); ++k) {  // what is only written is counted with the results
      const auto same = [&](const IValue& other) { return other.isTensor() && other.toTensor().is_same(given[k].toTensor()); };
      if (schema.arguments()[k].is_out() && given[k].isTensor() && std::none_of(given.begin(), given.begin() + k, same)) bytes -= size_of(given[k].toTensor());
    }
  }
  if (capturing && event != LAUNCH && event != FREE) refuse(name, "operation not permitted when stream is capturing");

  // A captured operation runs for its shapes alone: what it writes is put back.
  const bool records = capturing && event == LAUNCH;
  std::vector<std::pair<Tensor, Tensor>> before;
  if (records && writes) for (auto& [cuda, cpu] : call.aliases) before.emplace_back(cpu, cpu.clone());
  // CUDA's softmax reads half precision and writes float32 in one kernel, and back.
  std::optional<at::ScalarType> narrow;
  Tensor into;
  if ((schema.name() == "aten::_softmax" || schema.name() == "aten::_log_softmax") && given[2].toBool()) {
    inside[0] = inside[0].toTensor().to(at::kFloat);
    inside[2] = false;
  } else if (name.find("softmax_backward_data") != std::string::npos && given[3].toScalarType() != given[0].toTensor().scalar_type()) {
    narrow = given[3].toScalarType();
    inside[3] = given[0].toTensor().scalar_type();
    if (inside.size() > 4) into = std::exchange(inside[4], IValue(at::empty({0}, inside[0].toTensor().options()))).toTensor();
  } else if (name == "histc" && !given[0].toTensor().is_floating_point()) {  // a CPU counts floats alone
    narrow = given[0].toTensor().scalar_type();
    inside[0] = inside[0].toTensor().to(at::kDouble);
  }
  // Where counts alone are asked for, what is large is not computed: the shapes of its results are enough.
  std::vector<IValue> written;
  bool skips = bytes > most_computed && event == LAUNCH && writes && !narrow;
  for (size_t k = 0; k < given.size(); ++k) {
    const auto& argument = schema.arguments()[k];
    if (!argument.alias_info() || !argument.alias_info()->isWrite()) continue;
    skips &= argument.is_out() || (inside[k].isTensor() && size_of(inside[k].toTensor()) > most_computed);
    written.push_back(inside[k]);
  }
  // Nor does a captured operation run that returns nothing: there are no shapes to learn.
  skips |= records && writes && schema.returns().empty();
  if (skips && (schema.returns().empty() || schema.returns().size() == written.size()))
    inside = schema.returns().empty() ? c10::Stack() : c10::Stack(written.begin(), written.end());
  else
    operation.redispatchBoxed(Keys(c10::DispatchKey::CPU), &inside);
  if (most_computed < EVERYTHING && name.rfind("empty", 0) == 0) inside[0] = zeros_in_place_of(inside[0].toTensor());
  if (narrow) inside[0] = into.defined() ? into.resize_as_(inside[0].toTensor()).copy_(inside[0].toTensor()) : inside[0].toTensor().to(*narrow);
  for (auto& [now, then] : before) if (now.sizes() == then.sizes()) now.copy_(then);
  call.take_over();
  std::vector<Tensor> results;
  for (const IValue& value : inside) {
    const bool here = event == DOWN || (call.aliases.empty() && !call.names_a_device && !value.isTensorList());
    stack->push_back(event == DOWN ? given[0] : here ? value : mapped(value, [&](const Tensor& tensor) { return call.up(tensor); }));
    mapped(stack->back(), [&](const Tensor& tensor) { if (event == LAUNCH && name != "copy_") bytes += size_of(tensor) * (1 + GATHERS.count(name)); results.push_back(tensor); return tensor; });
  }
  if (records) capturing->push_back({operation, given, results});
  const bool product = event == LAUNCH && results.size() == 1;
  report(name, event, bytes, product ? flops_of(name, given, results[0]) : 0);
}

void replay(const Graph& graph) {
  for (const Recorded& each : graph) {
    c10::Stack stack(each.arguments.begin(), each.arguments.end());
    run(each.operation, &stack);
    size_t k = 0;
    for (const IValue& value : stack) mapped(value, [&](const Tensor& made) {
      const Tensor& kept = each.results.at(k++);
      if (!kept.is_same(made) && kept.data_ptr() != made.data_ptr()) alias_of(kept).copy_(alias_of(made));
      return made;
    });
  }
}

// -------- Attention: the kernel that CUDA would choose (without cuDNN's), computed by the CPU's flash attention

int64_t chosen(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double, bool causal, std::optional<double>, bool shares_heads) {
  enum { PRODUCTS, FLASH, EFFICIENT };
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, masked = mask && mask->defined();
  const bool own_heads = q.size(1) == k.size(1), dense = q.dim() == 4 && q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1;
  if (dense && !masked && half && q.size(-1) <= 256 && (own_heads || shares_heads) && !(causal && q.size(2) != k.size(2))) return FLASH;
  const bool aligned = q.size(-1) % (half ? 8 : 4) == 0;
  if (dense && own_heads && aligned && (half || q.scalar_type() == at::kFloat) && !(masked && mask->requires_grad())) return EFFICIENT;
  return PRODUCTS;
}
const bool choice_set = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&chosen), true);

Tensor repeated(const Tensor& keys, const Tensor& q) { return keys.size(1) == q.size(1) ? keys : keys.repeat_interleave(q.size(1) / keys.size(1), 1); }
Tensor given_back(const Tensor& gradient, const Tensor& keys) {
  return gradient.size(1) == keys.size(1) ? gradient : gradient.unflatten(1, {keys.size(1), -1}).sum(2);
}
long flops_of_attention(const Tensor& q, const Tensor& k, bool causal) { return 4 * q.numel() * k.size(2) / (causal ? 2 : 1); }
std::tuple<Tensor, Tensor> attend(const char* name, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
  Call call;
  Tensor a = call.down(q), b = call.down(k), c = call.down(v);
  std::optional<Tensor> d = bias && bias->defined() ? std::optional<Tensor>(call.down(*bias)) : std::nullopt;
  auto [out, logs] = size_of(k) <= most_computed ? at::_scaled_dot_product_flash_attention_for_cpu(a, repeated(b, q), repeated(c, q), 0.0, causal, d, scale)
                              : std::tuple(zeros_in_place_of(at::empty_like(a)), at::zeros({q.size(0), q.size(1), q.size(2)}, a.options().dtype(at::kFloat)));
  report(name, LAUNCH, size_of(q) + size_of(k) + size_of(v) + size_of(out), flops_of_attention(q, k, causal));
  return {call.up(out), call.up(logs)};
}
std::tuple<Tensor, Tensor, Tensor> attend_back(const char* name, const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logs, const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
  Call call;
  Tensor a = call.down(q), b = call.down(k), c = call.down(v);
  std::optional<Tensor> d = bias && bias->defined() ? std::optional<Tensor>(call.down(*bias)) : std::nullopt;
  auto [dq, dk, dv] = size_of(k) <= most_computed
      ? at::_scaled_dot_product_flash_attention_for_cpu_backward(call.down(g), a, repeated(b, q), repeated(c, q), call.down(out), call.down(logs), 0.0, causal, d, scale)
      : std::tuple(zeros_in_place_of(at::empty_like(a)), zeros_in_place_of(at::empty_like(b)), zeros_in_place_of(at::empty_like(c)));
  report(name, LAUNCH, 2 * (size_of(q) + size_of(k) + size_of(v)) + size_of(out), flops_of_attention(q, k, causal) * 5 / 2);
  return {call.up(dq), call.up(given_back(dk, b)), call.up(given_back(dv, c))};
}
Tensor nothing(const Tensor& q, at::ScalarType type = at::kLong) { return at::empty({0}, q.options().dtype(type)); }

using Optional = const std::optional<Tensor>&;
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool, std::optional<double> scale) {
  auto [out, logs] = attend("flash attention", q, k, v, std::nullopt, causal, scale);
  return {out, logs, nothing(q), nothing(q), q.size(2), k.size(2), nothing(q), nothing(q), nothing(q)};
}
std::tuple<Tensor, Tensor, Tensor> flash_back(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logs, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  return attend_back("flash attention, backward", g, q, k, v, out, logs, std::nullopt, causal, scale);
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v, Optional bias, bool, double, bool causal, std::optional<double> scale) {
  auto [out, logs] = attend("efficient attention", q, k, v, bias, causal, scale);
  return {out, logs, nothing(q), nothing(q)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_back(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out, const Tensor& logs, const Tensor&, const Tensor&, double, std::array<bool, 4>, bool causal, std::optional<double> scale) {
  auto [dq, dk, dv] = attend_back("efficient attention, backward", g, q, k, v, out, logs, bias, causal, scale);
  return {dq, dk, dv, Tensor()};
}

// Attention of sequences of any length, one after another: causal from their last tokens on, query heads that share key heads.
struct Sequences {
  std::vector<std::array<int64_t, 4>> rows;  // first query, last query, first key, last key
  Sequences(const Tensor& q_ends, const Tensor& k_ends, int64_t most_q, int64_t most_k) {
    TORCH_CHECK(q_ends.scalar_type() == at::kInt && k_ends.scalar_type() == at::kInt && q_ends.is_contiguous() && k_ends.is_contiguous(), "twin: ends are int32");
    const int *a = q_ends.data_ptr<int>(), *b = k_ends.data_ptr<int>();
    for (int64_t k = 0; k + 1 < q_ends.numel(); ++k) {
      TORCH_CHECK(a[k + 1] - a[k] <= most_q && b[k + 1] - b[k] <= most_k, "twin: a sequence is longer than the longest");
      rows.push_back({a[k], a[k + 1], b[k], b[k + 1]});
    }
  }
};
Tensor heads_first(const Tensor& x, int64_t first, int64_t last, int64_t heads) {
  return x.slice(0, first, last).to(at::kFloat).transpose(0, 1).repeat_interleave(heads / x.size(1), 0);
}
Tensor scores_of(const Tensor& q, const Tensor& k, double scale, bool causal) {
  Tensor scores = at::matmul(q, k.transpose(1, 2)) * scale;
  if (causal) scores.masked_fill_(at::ones({q.size(1), k.size(1)}, at::kBool).tril(k.size(1) - q.size(1)).logical_not(), -std::numeric_limits<double>::infinity());
  return scores;
}
bool looks_back(bool causal, std::optional<c10::SymInt> left, std::optional<c10::SymInt> right) {
  TORCH_CHECK(!left || *left < 0, "twin: no windows");
  return causal || (right && *right == 0);
}
void check_flash(const Tensor& q) {
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(q.size(-1) % 8 == 0 && q.size(-1) <= 256 && q.stride(-1) == 1, "twin: flash attention takes whole rows of 16 bytes");
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_of_sequences(const Tensor& q, const Tensor& k, const Tensor& v, Optional q_ends, Optional k_ends, c10::SymInt most_q, c10::SymInt most_k,
    double, bool causal, bool, std::optional<double> scale, std::optional<c10::SymInt> left, std::optional<c10::SymInt> right, Optional used, Optional, Optional pages, std::optional<int64_t>) {
  check_flash(q);
  TORCH_CHECK(!(used && used->defined()) && !(pages && pages->defined()), "twin: no pages");
  Call call;
  Tensor a = call.down(q), b = call.down(k), c = call.down(v), out = at::empty_like(a), logs = at::empty({a.size(1), a.size(0)}, at::kFloat);
  const bool computes = size_of(k) <= most_computed;
  if (!computes) out = zeros_in_place_of(out), logs = zeros_in_place_of(logs);
  long flops = 0;
  for (auto [q0, q1, k0, k1] : Sequences(call.down(*q_ends), call.down(*k_ends), most_q.expect_int(), most_k.expect_int()).rows) {
    flops += 4 * a.size(1) * a.size(2) * (q1 - q0) * (k1 - k0) / (causal ? 2 : 1);
    if (!computes) continue;
    Tensor scores = scores_of(heads_first(a, q0, q1, a.size(1)), heads_first(b, k0, k1, a.size(1)), scale.value_or(std::pow(a.size(2), -0.5)), looks_back(causal, left, right));
    out.slice(0, q0, q1).copy_(at::matmul(scores.softmax(-1), heads_first(c, k0, k1, a.size(1))).transpose(0, 1));
    logs.slice(1, q0, q1).copy_(scores.logsumexp(-1));
  }
  report("flash attention of sequences", LAUNCH, size_of(q) + size_of(k) + size_of(v) + size_of(out), flops);
  return {call.up(out), call.up(logs), nothing(q), nothing(q), nothing(q)};
}
std::tuple<Tensor, Tensor, Tensor> flash_of_sequences_back(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logs, const Tensor& q_ends, const Tensor& k_ends,
    c10::SymInt most_q, c10::SymInt most_k, double, bool causal, const Tensor&, const Tensor&, std::optional<double> given_scale, std::optional<c10::SymInt> left, std::optional<c10::SymInt> right) {
  check_flash(q);
  Call call;
  Tensor a = call.down(q), b = call.down(k), c = call.down(v), d = call.down(g), o = call.down(out), l = call.down(logs);
  Tensor dq = at::empty_like(a), dk = at::empty_like(b), dv = at::empty_like(c);
  const bool computes = size_of(k) <= most_computed;
  if (!computes) dq = zeros_in_place_of(dq), dk = zeros_in_place_of(dk), dv = zeros_in_place_of(dv);
  const double scale = given_scale.value_or(std::pow(a.size(2), -0.5));
  auto own_heads = [&](const Tensor& x) { return x.unflatten(0, {b.size(1), -1}).sum(1).transpose(0, 1); };
  long flops = 0;
  for (auto [q0, q1, k0, k1] : Sequences(call.down(q_ends), call.down(k_ends), most_q.expect_int(), most_k.expect_int()).rows) {
    flops += 10 * a.size(1) * a.size(2) * (q1 - q0) * (k1 - k0) / (causal ? 2 : 1);
    if (!computes) continue;
    Tensor each_q = heads_first(a, q0, q1, a.size(1)), each_k = heads_first(b, k0, k1, a.size(1)), given = heads_first(d, q0, q1, a.size(1));
    Tensor weights = (scores_of(each_q, each_k, scale, looks_back(causal, left, right)) - l.slice(1, q0, q1).unsqueeze(-1)).exp();
    Tensor pull = at::matmul(given, heads_first(c, k0, k1, a.size(1)).transpose(1, 2)) - (given * heads_first(o, q0, q1, a.size(1))).sum(-1, true);
    Tensor slope = weights * pull * scale;
    dq.slice(0, q0, q1).copy_(at::matmul(slope, each_k).transpose(0, 1));
    dk.slice(0, k0, k1).copy_(own_heads(at::matmul(slope.transpose(1, 2), each_q)));
    dv.slice(0, k0, k1).copy_(own_heads(at::matmul(weights.transpose(1, 2), given)));
  }
  report("flash attention of sequences, backward", LAUNCH, 2 * (size_of(q) + size_of(k) + size_of(v)) + size_of(out), flops);
  return {call.up(dq), call.up(dk), call.up(dv)};
}

// Convolutions of one channel each have kernels of their own on CUDA.
Tensor depthwise(const Tensor& x, const Tensor& w, at::IntArrayRef, Optional b, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  Call call;
  std::optional<Tensor> bias = b && b->defined() ? std::optional<Tensor>(call.down(*b)) : std::nullopt;
  Tensor out = at::conv2d(call.down(x), call.down(w), bias, stride, padding, dilation, x.size(1));
  report("_conv_depthwise2d", LAUNCH, size_of(x) + size_of(w) + size_of(out));
  return call.up(out);
}
std::tuple<Tensor, Tensor> depthwise_back(const Tensor& g, const Tensor& x, const Tensor& w, at::IntArrayRef, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, std::array<bool, 2> mask) {
  Call call;
  auto [dx, dw, db] = at::convolution_backward(call.down(g), call.down(x), call.down(w), c10::nullopt, stride, padding, dilation, false, {0, 0}, x.size(1), {mask[0], mask[1], false});
  report("_conv_depthwise2d_backward", LAUNCH, size_of(g) + size_of(x) + size_of(w));
  return {call.up(dx), call.up(dw)};
}
const bool depthwise_back_set = (at::native::conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise_back), true);

// A product of half precision that is summed into float32, which a CPU has no kernel for.
Tensor& add_product(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  Call call;
  call.down(out).copy_(at::addmm(call.down(self).to(type), call.down(a).to(type), call.down(b).to(type), beta, alpha));
  report("addmm.dtype_out", LAUNCH, size_of(self) + size_of(a) + size_of(b) + size_of(out), 2 * out.numel() * a.size(1));
  return out;
}

}  // namespace

namespace at { namespace { C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks) } }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_back);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_back);
  library.impl("_flash_attention_forward", &flash_of_sequences);
  library.impl("_flash_attention_backward", &flash_of_sequences_back);
  library.impl("_conv_depthwise2d", &depthwise);
  library.impl("addmm.dtype_out", &add_product);
  // These would fall into several operations, which CUDA runs as one.
  for (const char* name : {"copy_", "_grouped_mm", "set_", "set_.source_Tensor", "record_stream"}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames())
    if (each.name.rfind("aten::_foreach_", 0) == 0 && each.overload_name.find("out") == std::string::npos)
      library.impl((each.name.substr(6) + (each.overload_name.empty() ? "" : "." + each.overload_name)).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
}
// Collectives run on the backend of the CPU, which is gloo, and stand for NCCL's.
struct Silent final : c10::WarningHandler { void process(const c10::Warning&) override {} };
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard replaced(&silent);  // torch says that its own kernels are replaced
  for (const char* name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
       "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

extern "C" {
void twin_listen(void (*with)(const char*, int, long, long)) { listener = with; }
int twin_device(int index) { return index < 0 ? current : std::exchange(current, index); }
long twin_bytes(int most) { return most ? most_bytes_held : bytes_held; }
void twin_reset_most() { most_bytes_held = bytes_held.load(); }
void twin_resize(long storage, long bytes) {
  auto* cuda = reinterpret_cast<StorageImpl*>(storage);
  Storage cpu = Held::of(*cuda).cpu;
  at::native::resize_bytes_cpu(cpu.unsafeGetStorageImpl(), static_cast<size_t>(bytes));
  cuda->set_data_ptr_noswap(on_device(cpu, cuda->device().index()));
  cuda->set_nbytes(cpu.nbytes());
}
void twin_compute(long bytes) { most_computed = bytes; }
void twin_capture() { capturing = new Graph(); }
long twin_captured() {
  static long made = 0;
  graphs[++made] = std::move(*capturing);
  delete std::exchange(capturing, nullptr);
  return made;
}
long twin_size(long graph) { return static_cast<long>(graphs.at(graph).size()); }
void twin_forget(long graph) { graphs.erase(graph); }
void twin_replay(long graph) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto heard = std::exchange(listener, nullptr);
  replay(graphs.at(graph));
  listener = heard;
}
}
