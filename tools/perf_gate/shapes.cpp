#include "shapes.h"

#include <fstream>
#include <sstream>

#include "failure.h"
#include "mha.h"

namespace gate {
namespace {

// An instruction takes about 50 times as long when it is counted.
const char *const counting_lines[] = {
    "layer B=1 n=128 D=256 H=4 causal",
    "layer B=1 n=1 D=256 H=4",
    "layer B=1 n=4 D=256 H=4",
    "layer B=1 n=16 D=256 H=4",
    "attention B=1 n=256 H=2 head_dim=64",
    "attention B=1 n=256 H=2 head_dim=128 causal",
    "layer B=1 n=1 past=256 D=256 H=4 causal",
    "attention B=1 n=1 past=512 H=8 kv_heads=2 head_dim=64",
    "attention B=1 n=1 past=512 H=8 kv_heads=2 head_dim=64 kv_type=int8",
};

constexpr int64_t largest_dimension = INT32_MAX;
constexpr uint32_t sets[] = {MHA_INSTRUCTION_SET_AUTO, MHA_INSTRUCTION_SET_SCALAR, MHA_INSTRUCTION_SET_AVX2, MHA_INSTRUCTION_SET_AVX512,
                             MHA_INSTRUCTION_SET_NEON, MHA_INSTRUCTION_SET_AVX2_VNNI, MHA_INSTRUCTION_SET_AVX512_VNNI,
                             MHA_INSTRUCTION_SET_NEON_DOTPROD, MHA_INSTRUCTION_SET_NEON_I8MM};
const char *const set_names[] = {"auto", "scalar", "avx2", "avx512", "neon", "avx2_vnni", "avx512_vnni", "neon_dotprod", "neon_i8mm"};
const char *const kv_type_names[] = {"f32", "f16", "bf16", "int8"};

int64_t parse_dimension(const std::string &key, const std::string &value) {
  size_t used = 0;
  long long number = 0;
  try {
    number = std::stoll(value, &used);
  } catch (const std::exception &) {
    used = 0;
  }
  if (used == 0 || used != value.size() || number < 1 || number > largest_dimension) {
    throw CannotMeasure("'" + key + "=" + value + "' is no size; it has to be a whole number from 1 to " +
                        std::to_string(largest_dimension));
  }
  return number;
}

uint32_t parse_instruction_set(const std::string &value) {
  for (uint32_t set : sets) {
    if (value == set_names[set]) return set;
  }
  throw CannotMeasure("'" + value + "' is no instruction set; there are auto, scalar, avx2, avx2_vnni, avx512, avx512_vnni, neon, " +
                      "neon_dotprod and neon_i8mm");
}

uint32_t parse_kv_type(const std::string &value) {
  for (uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8}) {
    if (value == kv_type_names[type]) return type;
  }
  throw CannotMeasure("'" + value + "' is no type of a cache; there are f32, f16, bf16 and int8");
}

void need(const Shape &shape, int64_t value, const char *key) {
  if (value == 0) throw CannotMeasure(std::string(shape.is_layer ? "a layer" : "attention") + " needs " + key + "=");
}

}  // namespace

Shape parse_shape(const std::string &line) {
  std::istringstream words(line);
  Shape shape;
  std::string word;
  words >> word;
  if (word != "layer" && word != "attention") {
    throw CannotMeasure("'" + word +
                        "' is no kind of shape; a line begins with 'layer' or 'attention', such as 'layer B=1 n=128 D=768 H=12'");
  }
  shape.is_layer = word == "layer";
  shape.text = word;
  while (words >> word) {
    shape.text += " " + word;
    if (word == "causal") {
      shape.is_causal = true;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals), value = equals == std::string::npos ? "" : word.substr(equals + 1);
    int64_t *const size = key == "B"                         ? &shape.batch
                          : key == "n"                       ? &shape.n
                          : key == "n_kv" && !shape.is_layer ? &shape.n_kv
                          : key == "D" && shape.is_layer     ? &shape.width
                          : key == "H"                       ? &shape.heads
                          : key == "kv_heads"                ? &shape.kv_heads
                          : key == "head_dim"                ? &shape.head_dim
                          : key == "past"                    ? &shape.past
                          : key == "threads"                 ? &shape.threads
                                                             : nullptr;
    if (equals != std::string::npos && size) {
      *size = parse_dimension(key, value);
    } else if (equals != std::string::npos && key == "instruction_set") {
      shape.instruction_set = parse_instruction_set(value);
    } else if (equals != std::string::npos && key == "kv_type") {
      shape.kv_type = parse_kv_type(value);
    } else {
      throw CannotMeasure("'" + word + "' is no word of a line that begins with '" + (shape.is_layer ? "layer" : "attention") +
                          "'; see tools/perf_gate.sh --help for those that are");
    }
  }
  need(shape, shape.n, "n");
  need(shape, shape.heads, "H");
  if (shape.is_layer) need(shape, shape.width, "D");
  if (!shape.is_layer) need(shape, shape.head_dim, "head_dim");
  if (shape.is_layer && shape.head_dim == 0) {
    if (shape.width % shape.heads) throw CannotMeasure("H does not divide D; give head_dim= or another number of heads");
    shape.head_dim = shape.width / shape.heads;
  }
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  if (shape.past && shape.n_kv) throw CannotMeasure("n_kv= and past= are two ways to have keys; give one of them");
  if (shape.kv_type && !shape.past) throw CannotMeasure("kv_type= is that of a cache, which past= asks for");
  if (shape.n_kv == 0) shape.n_kv = shape.n;
  return shape;
}

std::vector<Shape> read_shapes(const std::string &path) {
  std::ifstream file(path);
  if (!file) throw CannotMeasure("the file of shapes '" + path + "' cannot be opened");
  std::vector<Shape> shapes;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      shapes.push_back(parse_shape(line));
    } catch (const CannotMeasure &wrong) {
      throw CannotMeasure(path + ":" + std::to_string(number) + ": " + wrong.what());
    }
  }
  if (file.bad()) throw CannotMeasure("the file of shapes '" + path + "' cannot be read");
  if (shapes.empty()) throw CannotMeasure("the file '" + path + "' has no shape; a line such as 'layer B=1 n=128 D=768 H=12' is one");
  return shapes;
}

std::vector<Shape> default_counting_shapes() {
  std::vector<Shape> shapes;
  for (const char *line : counting_lines) shapes.push_back(parse_shape(line));
  return shapes;
}

}  // namespace gate
