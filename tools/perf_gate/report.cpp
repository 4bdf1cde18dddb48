#include "report.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <memory>

#include "failure.h"

namespace gate {
namespace {

template <class... Values>
std::string format(const char *pattern, Values... values) {
  std::string text(static_cast<size_t>(snprintf(nullptr, 0, pattern, values...)), 0);
  snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

std::string times(const Interval &range) { return format("%.4g - %.4g ms", range.low * 1e3, range.high * 1e3); }

std::string outputs(const Difference &difference) {
  return difference.is_bit_equal ? "same bits" : format("differ by %.1e", difference.relative);
}

const char *word(Verdict verdict) { return verdict == Verdict::ok ? "ok" : verdict == Verdict::regression ? "SLOWER" : "too noisy"; }

// The table: a row of titles, then a row per shape.
std::vector<std::vector<std::string>> table(const Report &report) {
  std::vector<std::vector<std::string>> rows;
  if (report.is_count) {
    rows.push_back({"shape", "base instructions", "new instructions", "new / base", "outputs", "verdict"});
  } else {
    rows.push_back({"shape", "base", "new", "new / base", "95% interval", "rounds", "outputs", "verdict"});
  }
  for (const Result &result : report.results) {
    std::vector<std::string> row = {result.shape.text};
    if (report.is_count) {
      row.push_back(std::to_string(result.base_instructions));
      row.push_back(std::to_string(result.new_instructions));
      row.push_back(format("%.4f", result.ratio));
    } else {
      row.push_back(times(result.base_range));
      row.push_back(times(result.new_range));
      row.push_back(format("%.3f", result.ratio));
      row.push_back(format("%.3f - %.3f", result.ratio_interval.low, result.ratio_interval.high));
      row.push_back(std::to_string(result.base_seconds.size()));
    }
    row.push_back(outputs(result.difference));
    row.push_back(word(result.verdict));
    rows.push_back(row);
  }
  return rows;
}

std::string heading(const Report &report) {
  return format("%s: base = %s, new = %s, threshold %g%%",
                report.is_count ? "instructions of one call" : "time of one call, fastest - median round", report.base_name.c_str(),
                report.new_name.c_str(), report.threshold * 100);
}

// What the verdict rests on: of a regression the worst shape, of noise the noisiest.
std::string sentence(const Report &report) {
  const Verdict verdict = verdict_of(report);
  if (verdict == Verdict::ok) {
    return format("No regression: no shape takes %g%% more %s.", report.threshold * 100, report.is_count ? "instructions" : "time");
  }
  const Result *worst = nullptr;
  size_t count = 0;
  const auto badness = [&](const Result &result) {
    return verdict == Verdict::regression ? result.ratio : result.ratio_interval.high - result.ratio_interval.low;
  };
  for (const Result &result : report.results) {
    if (result.verdict != verdict) continue;
    ++count;
    if (!worst || badness(result) > badness(*worst)) worst = &result;
  }
  if (verdict == Verdict::regression) {
    return format("Regression in %zu of %zu shapes; the worst is '%s', which takes %.1f%% more %s.", count, report.results.size(),
                  worst->shape.text.c_str(), (worst->ratio - 1) * 100, report.is_count ? "instructions" : "time");
  }
  return format(
      "Too noisy to say for %zu of %zu shapes: '%s' came out between %+.1f%% and %+.1f%% (base %s, new %s). Run it again on a "
      "quieter machine, or with a larger --threshold or more --rounds.",
      count, report.results.size(), worst->shape.text.c_str(), (worst->ratio_interval.low - 1) * 100,
      (worst->ratio_interval.high - 1) * 100, times(worst->base_range).c_str(), times(worst->new_range).c_str());
}

std::string json_string(const std::string &text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      quoted += format("\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string json_numbers(const std::vector<double> &values) {
  std::string text = "[";
  for (const double value : values) text += format("%s%.9g", text.size() > 1 ? ", " : "", value);
  return text + "]";
}

void write(const std::string &path, const char *mode, const std::string &text) {
  FILE *const file = fopen(path.c_str(), mode);
  const bool is_written = file && fwrite(text.data(), 1, text.size(), file) == text.size();
  if ((file && fclose(file)) || !is_written) throw CannotMeasure("the report cannot be written to '" + path + "'");
}

}  // namespace

Verdict verdict_of(const Report &report) {
  Verdict worst = Verdict::ok;
  for (const Result &result : report.results) {
    if (result.verdict == Verdict::regression) return Verdict::regression;
    if (result.verdict == Verdict::too_noisy) worst = Verdict::too_noisy;
  }
  return worst;
}

void print(const Report &report) {
  const std::vector<std::vector<std::string>> rows = table(report);
  std::vector<size_t> widths(rows[0].size());
  for (const auto &row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  printf("%s\n\n", heading(report).c_str());
  for (const auto &row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (i) line += "  ";
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size(), ' ');
    }
    printf("%s\n", line.c_str());
  }
  printf("\n");
  printf("%s\n", sentence(report).c_str());
}

void write_json(const Report &report, const std::string &path) {
  const char *const verdicts[] = {"ok", "regression", "too_noisy"};
  std::string text = "{\n";
  text += format("  \"mode\": \"%s\",\n", report.is_count ? "count" : "time");
  text += "  \"base\": " + json_string(report.base_name) + ",\n  \"new\": " + json_string(report.new_name) + ",\n";
  text += format("  \"threshold\": %g,\n", report.threshold);
  text += format("  \"verdict\": \"%s\",\n", verdicts[static_cast<int>(verdict_of(report))]);
  text += "  \"sentence\": " + json_string(sentence(report)) + ",\n  \"shapes\": [";
  for (size_t i = 0; i < report.results.size(); ++i) {
    const Result &result = report.results[i];
    text += format("%s\n    {\n      \"shape\": %s,\n", i ? "," : "", json_string(result.shape.text).c_str());
    text += format("      \"verdict\": \"%s\",\n      \"ratio\": %.6g,\n", verdicts[static_cast<int>(result.verdict)], result.ratio);
    if (report.is_count) {
      text += format("      \"base_instructions\": %" PRIu64 ",\n      \"new_instructions\": %" PRIu64 ",\n", result.base_instructions,
                     result.new_instructions);
    } else {
      text += format("      \"ratio_interval\": [%.6g, %.6g],\n", result.ratio_interval.low, result.ratio_interval.high);
      text += "      \"base_seconds\": " + json_numbers(result.base_seconds) + ",\n";
      text += "      \"new_seconds\": " + json_numbers(result.new_seconds) + ",\n";
    }
    text += format("      \"outputs_bit_equal\": %s,\n      \"outputs_difference\": %.3g\n    }",
                   result.difference.is_bit_equal ? "true" : "false", result.difference.relative);
  }
  write(path, "w", text + "\n  ]\n}\n");
}

void append_markdown(const Report &report, const std::string &path) {
  const std::vector<std::vector<std::string>> rows = table(report);
  std::string text = "### mha perf gate\n\n" + sentence(report) + "\n\n" + heading(report) + "\n\n";
  for (size_t row = 0; row < rows.size(); ++row) {
    for (const std::string &cell : rows[row]) text += "| " + cell + " ";
    text += "|\n";
    if (row) continue;
    for (size_t i = 0; i < rows[0].size(); ++i) text += "|---";
    text += "|\n";
  }
  write(path, "a", text + "\n");
}

}  // namespace gate
