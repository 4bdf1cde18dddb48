// The example decoder.c, as a user runs it: files of weights that are written here, tokens, and its logits beside a decoder of plain loops.
#include <cmath>
#include <functional>
#include <map>

#include "tools/command_test.h"
#include "support/random.h"

namespace {

using command_test::Folder;
using command_test::Lines;
using command_test::Mha;  // here MHA_COMMAND is the example
using command_test::Result;
using command_test::Stored;

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Model {
  explicit Model(const std::string &type = "F32", bool tied = false) : is_tied(tied), dtype(type) {}

  int64_t layers = 2, width = 48, heads = 6, kv_heads = 2, hidden = 72, vocabulary = 50;
  bool is_tied;
  std::string dtype;
  std::map<std::string, Floats> tensors;  // as the file has them
  std::vector<Stored> stored;

  int64_t head_dim() const { return width / heads; }
  const Floats &tensor(int64_t layer, const std::string &name) const {
    return tensors.at("model.layers." + std::to_string(layer) + "." + name + ".weight");
  }
};

// The number that 16 bits stand for; and the bits of a number that they can hold.
float FromBf16(uint32_t bits) {
  bits <<= 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

float FromF16(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(1 + static_cast<float>(fraction) / 1024, static_cast<int>(exponent) - 15);
  return bits & 0x8000 ? -magnitude : magnitude;
}

void Add(Model *m, support::Random *random, const std::string &name, std::vector<int64_t> shape, double mean, double deviation) {
  Floats values(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
  std::string bytes;
  for (float &value : values) {
    value = static_cast<float>(mean + deviation * random->Normal());
    if (m->dtype == "F32") {
      bytes.append(reinterpret_cast<const char *>(&value), sizeof value);
      continue;
    }
    // The nearest below is good enough: any number of the type will do.
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    const float magnitude = std::fabs(value);
    uint32_t bits = word >> 16;
    if (m->dtype == "F16") {
      const int exponent = std::max(std::ilogb(magnitude), -14);  // below that, subnormal numbers
      bits = (word >> 16 & 0x8000) + (static_cast<uint32_t>(exponent + 14) << 10) +
             static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent));
    }
    value = m->dtype == "F16" ? FromF16(bits) : FromBf16(bits);
    bytes += {static_cast<char>(bits & 255), static_cast<char>(bits >> 8)};
  }
  m->tensors[name] = values;
  m->stored.push_back({name, std::move(shape), bytes, m->dtype});
}

Model MakeModel(Model m, double embedding_size = 1) {
  support::Random random(7);
  const int64_t kv_width = m.kv_heads * m.head_dim();
  const double by_width = 1 / std::sqrt(static_cast<double>(m.width)), by_hidden = 1 / std::sqrt(static_cast<double>(m.hidden));
  Add(&m, &random, "model.embed_tokens.weight", {m.vocabulary, m.width}, 0, embedding_size);
  for (int64_t l = 0; l < m.layers; ++l) {
    const auto add = [&](const std::string &name, std::vector<int64_t> shape, double mean, double deviation) {
      Add(&m, &random, "model.layers." + std::to_string(l) + "." + name + ".weight", std::move(shape), mean, deviation);
    };
    add("input_layernorm", {m.width}, 1, 0.3);
    add("self_attn.q_proj", {m.width, m.width}, 0, 2 * by_width);  // scores that matter
    add("self_attn.k_proj", {kv_width, m.width}, 0, by_width);
    add("self_attn.v_proj", {kv_width, m.width}, 0, by_width);
    add("self_attn.o_proj", {m.width, m.width}, 0, by_width);
    add("post_attention_layernorm", {m.width}, 1, 0.3);
    add("mlp.gate_proj", {m.hidden, m.width}, 0, by_width);
    add("mlp.up_proj", {m.hidden, m.width}, 0, by_width);
    add("mlp.down_proj", {m.width, m.hidden}, 0, by_hidden);
  }
  Add(&m, &random, "model.norm.weight", {m.width}, 1, 0.3);
  if (!m.is_tied) Add(&m, &random, "lm_head.weight", {m.vocabulary, m.width}, 0, by_width);
  return m;
}

// ---- The decoder in plain loops, in double precision, over all tokens at once

Doubles Normed(const Doubles &x, const Floats &weights) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  Doubles out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    out[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5) * static_cast<double>(weights[i]);
  }
  return out;
}

Doubles Product(const Floats &w, const Doubles &x) {  // w [outputs, inputs]
  Doubles out(w.size() / x.size(), 0);
  for (size_t o = 0; o < out.size(); ++o) {
    for (size_t i = 0; i < x.size(); ++i) out[o] += static_cast<double>(w[o * x.size() + i]) * x[i];
  }
  return out;
}

// Pairs of each head's elements i and i + head_dim / 2.
void Rotate(Doubles *row, int64_t head_dim, int64_t position) {
  for (size_t begin = 0; begin < row->size(); begin += static_cast<size_t>(head_dim)) {
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      const double angle = static_cast<double>(position) * std::pow(10000, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      double &a = (*row)[begin + static_cast<size_t>(i)], &b = (*row)[begin + static_cast<size_t>(i + head_dim / 2)];
      const double rotated = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = rotated;
    }
  }
}

// The logits behind each token.
std::vector<Doubles> PlainLogits(const Model &m, const std::vector<int> &tokens) {
  const Floats &embedding = m.tensors.at("model.embed_tokens.weight");
  std::vector<Doubles> x;
  for (const int token : tokens) x.emplace_back(embedding.begin() + token * m.width, embedding.begin() + (token + 1) * m.width);
  const size_t head_dim = static_cast<size_t>(m.head_dim());
  for (int64_t l = 0; l < m.layers; ++l) {
    std::vector<Doubles> keys, values;
    for (size_t p = 0; p < x.size(); ++p) {
      const Doubles normed = Normed(x[p], m.tensor(l, "input_layernorm"));
      Doubles q = Product(m.tensor(l, "self_attn.q_proj"), normed);
      keys.push_back(Product(m.tensor(l, "self_attn.k_proj"), normed));
      values.push_back(Product(m.tensor(l, "self_attn.v_proj"), normed));
      Rotate(&q, m.head_dim(), static_cast<int64_t>(p));
      Rotate(&keys[p], m.head_dim(), static_cast<int64_t>(p));
      Doubles context(q.size(), 0);
      for (size_t head = 0; head < static_cast<size_t>(m.heads); ++head) {
        const size_t kv = head / static_cast<size_t>(m.heads / m.kv_heads) * head_dim;
        Doubles weights(p + 1, 0);
        double sum = 0;
        for (size_t k = 0; k <= p; ++k) {
          for (size_t i = 0; i < head_dim; ++i) weights[k] += q[head * head_dim + i] * keys[k][kv + i];
          sum += weights[k] = std::exp(weights[k] / std::sqrt(static_cast<double>(head_dim)));
        }
        for (size_t k = 0; k <= p; ++k) {
          for (size_t i = 0; i < head_dim; ++i) context[head * head_dim + i] += weights[k] / sum * values[k][kv + i];
        }
      }
      const Doubles attended = Product(m.tensor(l, "self_attn.o_proj"), context);
      for (size_t i = 0; i < attended.size(); ++i) x[p][i] += attended[i];
    }
    for (Doubles &row : x) {
      const Doubles normed = Normed(row, m.tensor(l, "post_attention_layernorm"));
      Doubles gate = Product(m.tensor(l, "mlp.gate_proj"), normed);
      const Doubles up = Product(m.tensor(l, "mlp.up_proj"), normed);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      const Doubles down = Product(m.tensor(l, "mlp.down_proj"), gate);
      for (size_t i = 0; i < down.size(); ++i) row[i] += down[i];
    }
  }
  const Floats &head = m.is_tied ? embedding : m.tensors.at("lm_head.weight");
  for (Doubles &row : x) row = Product(head, Normed(row, m.tensors.at("model.norm.weight")));
  return x;
}

std::vector<int> Prompt(int count) {
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * i + 3 * i) % 47);
  return tokens;
}

std::string Text(const std::vector<int> &tokens) {
  std::string text;
  for (const int token : tokens) text += std::to_string(token) + "\n";
  return text;
}

// Runs the example; its tokens are each the largest of its logits, and these are at most `most` from those of the plain loops.
void ExpectPlainLogits(const Model &m, int prompt, int count, const std::string &threads, const std::string &type = "file",
                       const std::string &arithmetic = "f32", double most = 1e-4, double least = 0) {
  const Folder folder;
  const std::string model = folder.Write("model", command_test::Safetensors(m.stored)), logits_path = folder / "logits";
  std::vector<int> tokens = Prompt(prompt);
  const std::string prompt_path = folder.Write("prompt", Text(tokens)), heads = std::to_string(m.heads);
  const Result result = Mha({"run", model, heads, prompt_path, std::to_string(count), threads, type, arithmetic, logits_path});
  ASSERT_EQ(result.status, 0) << result.err;
  std::istringstream out(result.out);
  for (int token; out >> token;) tokens.push_back(token);
  ASSERT_EQ(tokens.size(), static_cast<size_t>(prompt + count)) << result.out;
  const std::string bytes = command_test::ReadFile(logits_path);
  ASSERT_EQ(bytes.size(), static_cast<size_t>(count * m.vocabulary) * sizeof(float));
  const std::vector<Doubles> plain = PlainLogits(m, tokens);
  double difference = 0;
  for (int i = 0; i < count; ++i) {
    Floats logits(static_cast<size_t>(m.vocabulary));
    std::memcpy(logits.data(), bytes.data() + static_cast<size_t>(i) * logits.size() * sizeof(float), logits.size() * sizeof(float));
    EXPECT_EQ(tokens[static_cast<size_t>(prompt + i)], std::max_element(logits.begin(), logits.end()) - logits.begin()) << i;
    for (size_t v = 0; v < logits.size(); ++v) {
      ASSERT_NEAR(static_cast<double>(logits[v]), plain[static_cast<size_t>(prompt + i - 1)][v], most) << "token " << i << ", logit " << v;
      difference = std::max(difference, std::fabs(static_cast<double>(logits[v]) - plain[static_cast<size_t>(prompt + i - 1)][v]));
    }
  }
  EXPECT_GE(difference, least);
}

TEST(Decoder, LogitsAreThoseOfPlainLoops) {
  const Model m = MakeModel(Model());
  for (const char *threads : {"1", "2", "5"}) ExpectPlainLogits(m, 45, 30, threads);
  ExpectPlainLogits(m, 1, 3, "1");
}

TEST(Decoder, PromptThatIsLongerThanACallIsCut) {
  Model m;
  m.layers = 1;
  m.width = m.hidden = 24;
  ExpectPlainLogits(MakeModel(m), 600, 2, "2");
}

TEST(Decoder, TakesTiedEmbeddings) { ExpectPlainLogits(MakeModel(Model("F32", true)), 20, 8, "1"); }

TEST(Decoder, TakesFilesOf16Bits) {
  ExpectPlainLogits(MakeModel(Model("BF16")), 20, 8, "1");
  ExpectPlainLogits(MakeModel(Model("F16"), 1e-4), 20, 8, "2");  // an embedding with subnormal numbers
  ExpectPlainLogits(MakeModel(Model("F16")), 20, 8, "1", "f32");
}

// Further off the fewer bits, so that each word is seen to do something.
TEST(Decoder, ComputesInIntegers) {
  const Model m = MakeModel(Model());
  ExpectPlainLogits(m, 20, 8, "1", "int8", "f32", 0.075, 0.02);
  ExpectPlainLogits(m, 20, 8, "1", "int8", "int16", 0.075, 0.02);
  ExpectPlainLogits(m, 20, 8, "2", "int8", "int8", 0.2, 0.076);
  ExpectPlainLogits(m, 20, 8, "1", "int4", "int8", 1.5, 0.3);
}

void ExpectSameBits(const Result &result) {
  EXPECT_EQ(result.status, 0) << result.err;
  const std::vector<std::string> lines = Lines(result.out);
  ASSERT_EQ(lines.size(), 5u) << result.out;
  EXPECT_EQ(lines[1], "one token at a time: the same bits");
  EXPECT_EQ(lines[2], "a shared prefix, beside another sequence: the same bits");
  EXPECT_EQ(lines[3], "wrong drafts taken back: the same bits");
  EXPECT_EQ(lines[4], "back into a shared prefix: the same bits");
}

TEST(Decoder, AllWaysToTheSameTokensGiveTheSameBits) {
  ExpectSameBits(Mha({}));
  const Folder folder;
  ExpectSameBits(Mha({"check", folder.Write("model", command_test::Safetensors(MakeModel(Model("BF16")).stored)), "6"}));
  ASSERT_EQ(Mha({"write", folder / "written", "2", "40", "5", "1", "33", "60"}).status, 0);
  ExpectSameBits(Mha({"check", folder / "written", "5"}));
}

// ---- What is wrong is said in a sentence

class DecoderRefuses : public testing::Test {
 protected:
  void Expect(const std::string &bytes, const std::string &words) const {
    ExpectOf({"run", folder_.Write("model", bytes), "6", prompt_, "3"}, words);
  }
  void ExpectOf(const command_test::Arguments &arguments, const std::string &words) const {
    const Result result = Mha(arguments);
    EXPECT_EQ(result.status, 1) << words;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << words << " is missing in: " << result.err;
  }

  // The model with one change.
  std::string Changed(const std::function<void(std::vector<Stored> *)> &change) const {
    std::vector<Stored> stored = MakeModel(Model()).stored;
    change(&stored);
    return command_test::Safetensors(stored);
  }

  Folder folder_;
  const std::string prompt_ = folder_.Write("prompt", "1 2 3");
};

TEST_F(DecoderRefuses, FilesThatAreNoSafetensors) {
  ExpectOf({"run", folder_ / "none", "6", prompt_, "3"}, "cannot be read");
  Expect("", "too short");
  Expect("1234567", "too short");
  Expect("\x7f" "ELF and so on, for some time", "says that its header has");
  Expect(command_test::SafetensorsWithHeader("", ""), "no '{' at byte 0");
  const std::string whole = command_test::Safetensors(MakeModel(Model()).stored);
  Expect(whole.substr(0, 100), "was cut short");
  Expect(whole.substr(0, whole.size() - 1), "cut short?");
  Expect(whole + "1", "behind its last tensor");
}

TEST_F(DecoderRefuses, HeadersThatAreNotAsTheFormatHasThem) {
  const std::pair<const char *, const char *> headers[] = {
      {"[]", "no '{' at byte 0"},
      {"{", "no string"},
      {"{\"a", "no end of a string"},
      {"{\"a\\", "no end of a string"},
      {"{\"a\n\":", "no printable character"},
      {"{\"a\":1}", "no '{'"},
      {"{\"a\":{}}", "no dtype, shape and data_offsets"},
      {R"({"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]})", "no ','"},
      {R"({"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]}} x)", "no end"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "no second offset"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "too many of them"},
      {R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})", "too many of them"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "no whole number"},
      {R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", "no number below 2^63"},
      {R"({"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", "each once"},
      {R"({"a":{"dtype":"F32","shape":[1],"colour":[0,4]}})", "no dtype, shape or data_offsets"},
      {R"({"a":{"dtype":"F32_AND_SOMETHING","shape":[1],"data_offsets":[0,4]}})", "at most 15 characters"},
      {R"({"__metadata__":{"a":1}})", "no string"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "4 bytes, which its shape"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", "4 bytes, which its shape"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387905,4611686018427387905,4],"data_offsets":[0,4]}})", "4 bytes, which its shape"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "cut short?"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "bytes 4 to 0"},
      {R"({"a":{"dtype":"X","shape":[1],"data_offsets":[1,4]}})", "a gap or overlap at byte 0"},
      {R"({"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"X","shape":[1],"data_offsets":[3,4]}})", "overlap at byte 4"},
      {R"({"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"X","shape":[0],"data_offsets":[4,4]}})", "a tensor twice"},
      {"{}", "behind its last tensor"}};
  for (const auto &[header, words] : headers) Expect(command_test::SafetensorsWithHeader(header, "1234"), words);
  Expect(command_test::Safetensors(MakeModel(Model()).stored, 2), "lies at an odd place");
}

TEST_F(DecoderRefuses, ModelsThatLackSomethingOrDoNotFitTogether) {
  Expect(Changed([](auto *stored) { stored->erase(stored->begin()); }), "has no tensor model.embed_tokens.weight");
  Expect(Changed([](auto *stored) { stored->at(14).name += "s"; }), "has no tensor model.layers.1.self_attn.o_proj.weight");
  Expect(Changed([](auto *stored) { stored->at(3).shape = {8, 96}; }), "0.self_attn.k_proj.weight should be a matrix [-1, 48]");
  Expect(Changed([](auto *stored) { stored->at(13).shape = {8, 96}; }), "1.self_attn.v_proj.weight should be a matrix [16, 48]");
  Expect(Changed([](auto *stored) { stored->at(1).shape = {48, 1}; }), "model.layers.0.input_layernorm.weight should be a vector [48]");
  Expect(Changed([](auto *stored) { stored->at(2).dtype = "I32"; }), "model.layers.0.self_attn.q_proj.weight holds I32");
  Expect(Changed([](auto *stored) {
           stored->at(4) = {stored->at(4).name, stored->at(4).shape, stored->at(4).bytes.substr(0, 2 * 16 * 48), "F16"};
         }),
         "several types");
  Expect(Changed([](auto *stored) { stored->erase(stored->begin() + 10); }), "has 20 tensors; 2 layers of Llama have 21");
  Expect(Changed([](auto *stored) { stored->erase(stored->begin() + 11); }), "has 20 tensors; 1 layers of Llama have 12");
  Expect(Changed([](auto *stored) { stored->push_back(command_test::Store("model.layers.0.self_attn.q_proj.bias", {48}, Floats(48))); }),
         "has 22 tensors");
  const std::string good = folder_.Write("good", Changed([](auto *) {}));
  ExpectOf({"run", good, "7", prompt_, "3"}, "7 heads do not divide its queries");
  ExpectOf({"run", good, "0", prompt_, "3"}, "0 heads do not divide its queries");
  ExpectOf({"run", good, "48", prompt_, "3"}, "dims");  // heads of one column cannot be rotated
}

TEST_F(DecoderRefuses, PromptsAndWordsThatAreNone) {
  const std::string good = folder_.Write("good", Changed([](auto *) {}));
  ExpectOf({"run", good, "6", folder_ / "none", "3"}, "none: cannot be read");
  ExpectOf({"run", good, "6", folder_.Write("empty", ""), "3"}, "numbers of tokens are expected");
  ExpectOf({"run", good, "6", folder_.Write("words", "1 2 three"), "3"}, "numbers of tokens are expected");
  ExpectOf({"run", good, "6", folder_.Write("large", "1 50"), "3"}, "the token 50 is none of the 50");
  ExpectOf({"run", good, "6", folder_.Write("negative", "-1"), "3"}, "the token -1 is none of the 50");
  ExpectOf({"run", good, "6", prompt_, "0"}, "1 or more");
  ExpectOf({"run", good, "6", prompt_, "3", "1", "f64"}, "f64 is no type of weights");
  ExpectOf({"run", good, "6", prompt_, "3", "1", "int8", "int4"}, "int4 is no arithmetic");
  ExpectOf({"run", good, "6", prompt_, "3", "1", "file", "int8"}, "weight_type");
  ExpectOf({"write", folder_ / "w", "1", "10", "3", "1", "8", "8"}, "heads that divide the width evenly");
  ExpectOf({"write", folder_ / "no/w", "1", "8", "2", "1", "8", "8"}, "cannot be written");
  ExpectOf({"help"}, "decoder [write FILE");
}

}  // namespace
