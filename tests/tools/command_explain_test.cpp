// `mha explain` shows every step of a layer with its numbers, on a terminal and as a page.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tools/command_layers.h"

namespace {

using namespace command_test;

// ---- explain --------------------------------------------------------------------------------------------------------------------

// The lines of one step, from its title to the next; the last occurrence where steps are shown twice.
std::vector<std::string> StepOf(const std::string &text, const std::string &number) {
  const std::string title = "\nStep " + number + " ";
  const size_t begin = text.rfind(title);
  if (begin == std::string::npos) return {};
  return Lines(text.substr(begin + 1, text.find("\nStep ", begin + 1) - begin - 1));
}

bool Contains(const std::vector<std::string> &lines, const std::string &text) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string &line) { return line.find(text) != std::string::npos; });
}

TEST(Explain, ShowsTheWorkedExampleStepByStep) {
  const Result result = Mha({"explain"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const std::string number : {"1", "2", "3", "4", "5", "6", "7", "8a", "8b", "8c", "9", "10", "11", "12"}) {
    EXPECT_FALSE(StepOf(result.out, number).empty()) << "step " << number;
  }
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "(6, 18)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "fused projection"));
  EXPECT_TRUE(Contains(StepOf(result.out, "5"), "(1, 3, 6) -> (1, 3, 2, 3)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "6"), "(1, 3, 2, 3) -> (1, 2, 3, 3)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "11"), "(1, 3, 2, 3) -> (1, 3, 6)"));
  // X times W_Q, by hand: 1 * 0.4993 + 2 * 0.4096 + 3 * 0.2798 + 4 * 0.5394 + 5 * 0.9705 + 6 * 0.1674 = 10.1724.
  EXPECT_TRUE(Contains(StepOf(result.out, "4"), "10.1724  11.6849  11.5060   9.7377   5.3125   8.6791"));
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos) << "colours off a terminal";
}

// The numbers as the worked example prints them, but for its last digits: it rounded numbers that it had not shown.
TEST(Explain, ShowsTheNumbersOfTheGroupedExample) {
  const std::string out = Mha({"explain"}).out;
  const std::vector<std::string> scores = StepOf(out, "7");
  EXPECT_TRUE(Contains(scores, "0.6404  0.4114  0.1614    1.1733  1.3573  0.6858"));
  EXPECT_TRUE(Contains(scores, "0.8138  0.8505  0.3914    1.5600  1.6706  0.7266"));
  EXPECT_TRUE(Contains(scores, "1.3846  1.5269  0.6605    1.4567  1.5143  0.5443"));
  const std::vector<std::string> masked = StepOf(out, "8b");
  EXPECT_TRUE(Contains(masked, "0.3697    -inf    -inf    0.6774    -inf    -inf"));
  const std::vector<std::string> weights = StepOf(out, "8c");
  EXPECT_TRUE(Contains(weights, "1.0000  0.0000  0.0000    1.0000  0.0000  0.0000"));
  EXPECT_TRUE(Contains(weights, "0.4947  0.5053  0.0000    0.4841  0.5159  0.0000"));
  EXPECT_TRUE(Contains(weights, "0.3644  0.3956  0.2399    0.3811  0.3939  0.2250"));
  const std::vector<std::string> context = StepOf(out, "9");
  EXPECT_TRUE(Contains(context, "0.8375  0.7430  0.8563    0.7458  0.6515  0.1220"));
  EXPECT_TRUE(Contains(context, "0.4757  0.4464  0.4604    0.7119  0.5406  0.4058"));
  EXPECT_TRUE(Contains(context, "0.3985  0.5703  0.3803    0.7352  0.5740  0.4750"));
  const std::vector<std::string> merged = StepOf(out, "11");
  EXPECT_TRUE(Contains(merged, "0.3985  0.5703  0.3803  0.7352  0.5740  0.4750"));
  EXPECT_TRUE(Contains({Lines(out).back()}, "without an output projection"));
}

TEST(Explain, HasColoursOnATerminalUnlessToldOtherwise) {
  const Result with = MhaOnTerminal({"explain"}, 100);
  EXPECT_EQ(with.status, 0);
  EXPECT_NE(with.out.find("\x1b[1;36mStep 1 "), std::string::npos);
  EXPECT_EQ(MhaOnTerminal({"explain"}, 100, "1").out.find('\x1b'), std::string::npos);
  EXPECT_NE(MhaOnTerminal({"explain"}, 100, "").out.find('\x1b'), std::string::npos) << "an empty NO_COLOR does not count";
}

TEST(Explain, FitsIntoATerminalOfEightyColumns) {
  for (const std::string &line : Lines(MhaOnTerminal({"explain"}, 80, "1").out)) EXPECT_LE(line.size(), 81u) << line;  // with \r
}

class ExplainFile : public testing::Test {
 protected:
  Result Explain(const std::vector<Stored> &tensors, const Arguments &more = {}) {
    WriteLayer(folder_, tensors);
    WriteInput(folder_, p_);
    Arguments arguments = {"explain", "--weights",      folder_ / "layer.safetensors", "--heads", std::to_string(p_.num_heads),
                           "--input", folder_ / "x.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Mha(arguments);
  }

  Problem p_;
  Folder folder_;
};

TEST_F(ExplainFile, ShowsTheCornersOfLargeMatrices) {
  p_.n_q = 40;
  p_.num_heads = p_.num_kv_heads = 12;
  p_.head_dim = p_.head_dim_v = 16;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 192;
  Fill(&p_);
  const Result result = Explain(Gpt2(p_, "h.0.attn."), {"--causal"});
  ASSERT_EQ(result.status, 0) << result.err;
  for (const std::string &line : Lines(result.out)) EXPECT_LE(line.size(), 140u) << line;
  EXPECT_LE(Lines(result.out).size(), 420u);
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "(192, 576)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "b_Q"));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "..."));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "head 12"));
  EXPECT_FALSE(Contains(StepOf(result.out, "7"), "head 3"));
  EXPECT_TRUE(Contains(StepOf(result.out, "12"), "W_O"));
  EXPECT_TRUE(Contains(StepOf(result.out, "1"), "first of 2 sequences"));
}

TEST_F(ExplainFile, ShowsTheSameOutputAsRun) {
  Fill(&p_);
  p_.is_causal = true;
  const Result result = Explain(Linears(p_, "W_query", "W_key", "W_value", "out_proj"), {"--causal"});
  ASSERT_EQ(result.status, 0) << result.err;
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {2, 7, 24}, &y);
  for (int64_t row = 0; row < p_.n_q; row++) {
    char start[64];
    std::snprintf(start, sizeof start, "%.4f", static_cast<double>(y[row * 24]));
    EXPECT_TRUE(Contains(StepOf(result.out, "12"), start)) << start;
  }
}

TEST_F(ExplainFile, ShowsGroupedHeadsCrossAttentionAndPackedLayers) {
  p_.num_kv_heads = 2;
  p_.n_kv = 5;
  p_.is_causal = false;
  Fill(&p_);
  const std::vector<Stored> tensors = Linears(p_, "q_proj", "k_proj", "v_proj", "o_proj");
  const std::string key = folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key));
  const Result result = Explain(tensors, {"--no-rope", "--key", key});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(Contains(StepOf(result.out, "2"), "2 key and value heads"));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "(1, 4, 7, 6) x (1, 2, 5, 6)^T -> (1, 4, 7, 5)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "8b"), "Nothing is masked"));

  ASSERT_EQ(
      Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--no-rope", "--output", folder_ / "layer.mha"}).status, 0);
  const Result packed = Mha({"explain", "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy", "--key", key});
  ASSERT_EQ(packed.status, 0) << packed.err;
  EXPECT_EQ(StepOf(packed.out, "9"), StepOf(result.out, "9"));
  EXPECT_TRUE(Contains(StepOf(packed.out, "3"), "(packed: not shown)"));
  EXPECT_FALSE(Contains(StepOf(result.out, "3"), "not shown"));
}

// ---- explain --html: what a browser shows of it is in explain_html_test.py -------------------------------------------------------

int Count(const std::string &text, const std::string &part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) count++;
  return count;
}

TEST(ExplainHtml, IsOnePageThatNeedsNothingElse) {
  const Folder folder;
  const Result result = Mha({"explain", "--html", folder / "page.html", "--tokens", "the cat sleeps"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind((folder / "page.html") + ": 2 attention maps of 3 x 3 weights, ", 0), 0u) << result.err;
  EXPECT_EQ(Lines(result.err).size(), 1u) << result.err;
  EXPECT_EQ(folder.Names(), std::set<std::string>{"page.html"});
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  for (const std::string elsewhere : {"http://", "https://", "@import", "url(", "<link rel=stylesheet", "src=\"/"}) {
    EXPECT_EQ(page.find(elsewhere), std::string::npos) << elsewhere;
  }
}

TEST(ExplainHtml, HasTheStepsAndNumbersThatTheTerminalShows) {
  const Folder folder;
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html"}).status, 0);
  const std::string page = ReadFile(folder / "page.html"), shown = Mha({"explain"}).out;
  EXPECT_EQ(Count(page, "<section class=\"card step\">"), Count(shown, "\nStep "));
  for (const std::string number : {"10.1724", "18.8148", "0.8505", "0.3956", "0.5703"}) {
    EXPECT_NE(shown.find(number), std::string::npos) << number;
    EXPECT_NE(page.find(">" + number + "</td>"), std::string::npos) << number;
  }
  EXPECT_EQ(Count(page, "<td class=no>\u2212\u221e</td>"), 12) << "-inf in 2 examples of 2 heads";
}

TEST(ExplainHtml, TokensAreEscaped) {
  const Folder folder;
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html", "--tokens", "<script>x</script> \"'>&amp; \x01\x1b[m"}).status, 0);
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_EQ(Count(page, "<script>"), 1) << "that of the page";
  EXPECT_NE(page.find("<th scope=row>&lt;script&gt;x&lt;/script&gt;</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>&quot;&#39;&gt;&amp;amp;</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>??[m</th>"), std::string::npos);
}

TEST(ExplainHtml, LongTokensAreShortenedBetweenLetters) {
  const Folder folder;
  const std::string twenty = "\u00e4bcdefghij\u00e4bcdefghi\u00e4";
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html", "--tokens", twenty + " " + twenty + "\u00e4 c"}).status, 0);
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_NE(page.find("<th scope=row>" + twenty + "</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>" + twenty + "\u2026</th>"), std::string::npos);
}

TEST(ExplainHtml, TokensThatDoNotFitAreRefused) {
  const Folder folder;
  const std::string page = folder / "page.html";
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", "the cat"}),
                {"mha: --tokens: 2 tokens for 3 rows of the worked example; one for each is expected, with blanks between them\n"});
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", "the cat sleeps well"}), {"--tokens: 4 tokens for 3 rows"});
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", ""}), {"--tokens: 0 tokens for 3 rows"});
  ExpectRefusal(Mha({"explain", "--html", page, "--key-tokens", "a b c"}), {"--key-tokens: ", "leave it out, or give --key"});
  ExpectRefusal(Mha({"explain", "--tokens", "the cat sleeps"}), {"mha: --tokens: labels the maps of --html, which is not given\n"});
  ExpectRefusal(Mha({"explain", "--key-tokens", "a"}), {"mha: --key-tokens: labels the maps of --html, which is not given\n"});
  ExpectRefusal(Mha({"explain", "--html"}), {"--html: a value is expected after it"});
  EXPECT_EQ(folder.Names(), std::set<std::string>{});
}

TEST_F(ExplainFile, HtmlLabelsKeysOfTheirOwn) {
  p_.n_kv = 2;
  p_.is_causal = false;
  Fill(&p_);
  const std::string key = folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key)), page = folder_ / "page.html";
  const auto tensors = Gpt2(p_);
  ASSERT_EQ(Explain(tensors, {"--key", key, "--html", page, "--tokens", "a b c d e f g", "--key-tokens", "left right"}).status, 0);
  EXPECT_NE(ReadFile(page).find("title=\"g \u2192 right: 0."), std::string::npos);
  EXPECT_EQ(Count(ReadFile(page), "<th scope=col>right</th>"), 4) << "one for each head";
  ExpectRefusal(Explain(tensors, {"--key", key, "--html", page, "--key-tokens", "left"}),
                {"--key-tokens: 1 token for 2 rows of ", "k.npy"});
}

TEST_F(ExplainFile, HtmlIsWrittenWholeOrNotAtAll) {
  Fill(&p_);
  const std::vector<Stored> tensors = Gpt2(p_);
  const std::string page = folder_.Write("page.html", "what was there before");
  const auto before = [&] { return std::set<std::string>{"layer.safetensors", "page.html", "x.npy"}; };
  ExpectRefusal(Explain(tensors, {"--html", page, "--tokens", "a b"}), {"--tokens"});
  ExpectRefusal(Explain(tensors, {"--html", page, "--kv-heads", "3"}), {"layer.safetensors"});  // found once the file is begun
  EXPECT_EQ(ReadFile(page), "what was there before");
  EXPECT_EQ(folder_.Names(), before());
  ASSERT_EQ(Explain(tensors, {"--html", page}).status, 0);
  EXPECT_NE(ReadFile(page).find("</html>"), std::string::npos);
  EXPECT_EQ(folder_.Names(), before());

  ExpectRefusal(Explain(tensors, {"--html", folder_ / "x.npy"}), {"mha: --html: ", "is also the --input"});
  ExpectRefusal(Explain(tensors, {"--html", folder_ / "layer.safetensors"}), {"mha: --html: ", "is also the --weights"});
  ExpectRefusal(Explain(tensors, {"--html", "-"}), {"mha: --html: ", "standard output"});
  ExpectRefusal(Explain(tensors, {"--html", folder_ / "nowhere/page.html"}), {"nowhere/page.html", "cannot be written"});
  ExpectRefusal(Explain(tensors, {"--html", "/dev/full"}), {"/dev/full", "cannot be written"});
}

TEST_F(ExplainFile, HtmlOfALongInputIsReducedAndSaysSo) {
  p_.batch = 1;
  p_.n_q = p_.n_kv = 4096;
  p_.num_heads = p_.num_kv_heads = 2;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 12;
  Fill(&p_);
  const std::string page = folder_ / "page.html";
  std::string tokens;
  for (int i = 0; i < 4096; i++) tokens += "\"<token>\" ";
  const Result result = Explain(Gpt2(p_), {"--causal", "--html", page, "--tokens", tokens});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("2 attention maps of 4096 x 4096 weights, reduced to 683 x 683 cells, each the mean of 6 x 6, "),
            std::string::npos)
      << result.err;
  const std::string html = ReadFile(page);
  EXPECT_LE(html.size(), size_t{4} << 20) << "the most that the help promises";
  EXPECT_NE(html.find("Reduced: 4096 \u00d7 4096 weights are too many to draw."), std::string::npos);
}

// As many numbers, labels and long tokens as can be.
TEST_F(ExplainFile, HtmlStaysBelowItsLimit) {
  p_.num_heads = p_.num_kv_heads = 256;
  p_.head_dim = p_.head_dim_v = 1;
  for (const int64_t n : {5, 6, 12, 40}) {
    p_.n_q = p_.n_kv = n;
    Fill(&p_);
    std::string tokens;
    for (int64_t i = 0; i < n; i++) tokens += std::string(2000, '"') + " ";
    const Result result = Explain(Gpt2(p_), {"--html", folder_ / "page.html", "--tokens", tokens});
    ASSERT_EQ(result.status, 0) << result.err;
    const std::string html = ReadFile(folder_ / "page.html");
    EXPECT_LE(html.size(), size_t{4} << 20) << n << " tokens";
    EXPECT_EQ(Count(html, "<figure class=map>"), 256);
  }
}

TEST_F(ExplainFile, HtmlOfManyHeadsDrawsTheFirst) {
  p_.n_q = p_.n_kv = 40;
  p_.num_heads = p_.num_kv_heads = 300;
  p_.head_dim = p_.head_dim_v = 1;
  Fill(&p_);
  const Result result = Explain(Gpt2(p_), {"--html", folder_ / "page.html"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("256 attention maps of 40 x 40 weights, of the first of 300 heads"), std::string::npos) << result.err;
  const std::string html = ReadFile(folder_ / "page.html");
  EXPECT_EQ(Count(html, "<figure class=map>"), 256);
  EXPECT_NE(html.find("Drawn are the first 256 of 300 heads."), std::string::npos);
  EXPECT_LE(html.size(), size_t{4} << 20);
}

TEST_F(ExplainFile, RefusesWhatIsTooLongOrEmpty) {
  Fill(&p_);
  ASSERT_EQ(Explain(Gpt2(p_)).status, 0);
  folder_.Write("x.npy", Npy({20000, 24}, std::vector<float>(20000 * 24, 0.0f)));
  const Arguments arguments = {"explain", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--input", folder_ / "x.npy"};
  ExpectRefusal(Mha(arguments), {"x.npy", "too long"});
  folder_.Write("x.npy", Npy({0, 24}, {}));
  ExpectRefusal(Mha(arguments), {"x.npy", "(0, 24)"});
  ExpectRefusal(Mha({"explain", "--weights", folder_ / "layer.safetensors", "--heads", "4"}), {"--input"});
  ExpectRefusal(Mha({"explain", "--input", folder_ / "x.npy"}), {"--weights"});
}

}  // namespace
