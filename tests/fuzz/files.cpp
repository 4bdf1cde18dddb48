// Any bytes as each kind of file that the command mha reads. A reader either takes them, or says in
// one sentence what is wrong with which file: no other exception, std::bad_alloc included, and no
// address outside of the file. A packed layer or rows that are cut short are refused. What begins
// with '{' also stands where files have JSON: as the header of weights, and as the call behind a
// packed layer.
#include "../../tools/command/files.cpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <functional>

#include "../../tools/command/call.cpp"
#include "../../tools/command/config.cpp"
#include "../../tools/command/layer.cpp"
#include "../../tools/command/npy.cpp"
#include "../../tools/command/safetensors.cpp"
#include "fuzz/bytes.h"
#include "support/interface_support.h"

namespace {

using namespace command;

// A file in memory, under a name of its own.
class File {
 public:
  explicit File(const std::string &bytes = "") : file_(memfd_create("mha fuzz", 0)) {
    fuzz::Expect(file_ >= 0, "no file in memory");
    Set(bytes);
  }
  void Set(const std::string &bytes) {
    const bool is_set = ftruncate(file_, 0) == 0 && pwrite(file_, bytes.data(), bytes.size(), 0) ==
                                                        static_cast<ssize_t>(bytes.size());
    fuzz::Expect(is_set, "no space for a file in memory");
  }
  std::string Path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

// Reads the file, of these bytes from now on. Whether the reader takes it.
bool IsTaken(File *file, const std::string &bytes, const std::function<void()> &read) {
  file->Set(bytes);
  std::string sentence;
  bool is_taken = false;
  try {
    read();
    is_taken = true;
  } catch (const InputError &error) {
    sentence = error.what();
  } catch (const std::exception &error) {
    fuzz::Expect(false, "an exception that is no sentence", error.what());
  }
  const bool names_file = sentence.find("/proc/self/fd/") != std::string::npos;
  fuzz::Expect(is_taken || (names_file && sentence.size() < 2000), "not a sentence about the file",
               sentence.c_str());
  return is_taken;
}

// As IsTaken. The same file without its end is refused.
void ReadWhole(File *file, const std::string &bytes, const std::function<void()> &read) {
  if (!IsTaken(file, bytes, read)) return;
  for (size_t i = 0; i < 8; i++) {
    const size_t left = (bytes.size() * i + bytes.size() % 7) / 8;
    fuzz::Expect(!IsTaken(file, bytes.substr(0, left), read), "a file that is cut short is taken");
  }
}

volatile float sink;

void ReadRows(const std::string &path) {
  const Rows rows(path);
  const unsigned char *first = static_cast<const unsigned char *>(rows.from(0));
  const unsigned char *behind =
      static_cast<const unsigned char *>(rows.from(rows.batch() * rows.count()));
  for (; first != behind; first++) sink = *first;
}

void ReadTensors(const std::string &path, const std::string &bytes) {
  const SafetensorsFile file(path);
  const uint64_t front = 8 + little_endian(reinterpret_cast<const unsigned char *>(bytes.data()));
  for (const auto &[name, tensor] : file.tensors()) {
    fuzz::Expect(tensor.begin <= tensor.end && tensor.end <= bytes.size() - front,
                 "a tensor outside of the file");
    const bool is_read = tensor.dtype == "F32" || tensor.dtype == "F16" || tensor.dtype == "BF16";
    uint64_t values_of_shape = 1;
    for (const int64_t extent : tensor.shape) values_of_shape *= static_cast<uint64_t>(extent);
    const size_t count =
        is_read ? (tensor.end - tensor.begin) / (tensor.dtype == "F32" ? 4 : 2) : 0;
    fuzz::Expect(!is_read || count == values_of_shape,
                 "a tensor with another number of values than its shape says");
    std::vector<std::unique_ptr<float[]>> copies;
    const float *const values = is_read ? file.values(name, &copies) : nullptr;
    for (size_t i = 0; i < count; i++) sink = values[i];
  }
}

// Packs, looks at the packed layer, and prepares a call. Options: one head, as the weights below
// have it.
void ReadLayer(LayerOptions options) {
  const bool has_options = options.packed.empty() && options.config.empty();
  options.num_heads = has_options ? 1 : 0;
  options.without_config = options.is_causal = options.without_rope = has_options;
  const Layer layer(options);
  const PreparedCall prepared(layer.call(), layer.shape(), 3);
  const std::string call = packed_call(layer.call());
  const Call again =
      read_packed_call(layer.name(), reinterpret_cast<const unsigned char *>(call.data()),
                       call.size(), layer.shape());
  fuzz::Expect(again.text() == layer.call().text(),
               "a call that is packed and read becomes another one", again.text().c_str());
}

std::string WithHeader(const std::string &json, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 64; i += 8) bytes += static_cast<char>(json.size() >> i);
  return bytes + json + std::string(data_bytes, '\0');
}

// Of one head of 4, named as in these models.
std::string Weights(const std::string &prefix, const std::vector<std::string> &matrices,
                    const std::vector<std::string> &rows) {
  nlohmann::json header;
  size_t at = 0;
  const auto add = [&](const std::string &name, const std::vector<size_t> &shape, size_t count) {
    header[prefix + name] = {
        {"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + 4 * count}}};
    at += 4 * count;
  };
  for (const std::string &name : matrices) add(name, {4, 4}, 16);
  for (const std::string &name : rows)
    add(name, {name == "sinks" ? size_t{1} : 4}, name == "sinks" ? 1 : 4);
  return WithHeader(header.dump(), at);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const rlimit memory = {
      1 << 30,
      1 << 30};  // what a file of a few bytes never takes; the sanitizers have limits of their own
  static const int is_limited = MHA_TEST_SANITIZED ? 0 : setrlimit(RLIMIT_AS, &memory);
  fuzz::Expect(is_limited == 0, "memory cannot be limited");
  static File file;
  static const std::vector<std::string> llama = {"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                                 "o_proj.weight"};
  static const File weights[] = {
      File(Weights("layers.1.self_attn.", llama, {})),
      File(Weights("layers.0.self_attn.", llama, {"q_norm.weight", "k_norm.weight"})),
      File(Weights("layers.0.self_attn.", llama, {"sinks"})),
  };
  const std::string bytes(reinterpret_cast<const char *>(data), size), path = file.Path();
  LayerOptions from_weights, from_packed;
  from_weights.weights = from_packed.packed = path;
  if (size == 0 || data[0] != '{') {
    ReadWhole(&file, bytes, [&] { ReadRows(path); });
    IsTaken(&file, bytes, [&] { ReadTensors(path, bytes); });
    IsTaken(&file, bytes, [&] { ReadLayer(from_weights); });
    ReadWhole(&file, bytes, [&] { ReadLayer(from_packed); });
    return 0;
  }
  for (const File &given : weights) {
    LayerOptions from_config;
    from_config.weights = given.Path();
    from_config.config = path;
    IsTaken(&file, bytes, [&] { ReadLayer(from_config); });
  }
  const std::string with_header = WithHeader(bytes, 512);
  IsTaken(&file, with_header, [&] { ReadTensors(path, with_header); });
  IsTaken(&file, with_header, [&] { ReadLayer(from_weights); });

  static const std::string packed = [] {
    LayerOptions options;
    options.weights = weights[0].Path();
    options.num_heads = 1;
    options.without_config = options.is_causal = options.without_rope = true;
    const Layer layer(options);
    return std::string(reinterpret_cast<const char *>(layer.bytes()), layer.num_bytes());
  }();
  const uint64_t sum = checksum(data, size);
  ReadWhole(&file, packed + bytes + little_endian(sum) + little_endian(size) + "mha call",
            [&] { ReadLayer(from_packed); });
  return 0;
}
