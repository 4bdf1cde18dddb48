#include "html_page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "error.h"
#include "html_assets.h"
#include "mha.h"

namespace command {
namespace {

constexpr int64_t kMostNumbers = 12;        // rows and columns of a map that is a table of numbers
constexpr int64_t kMostNumberCells = 8192;  // of all such tables together: a number takes a hundred times as much as a pixel
constexpr int64_t kMostLabels = 40;         // rows and columns of a picture with a label for each
constexpr size_t kMostRowsNamed = 4;        // in a sentence about rows

// How a map is drawn: as a table of numbers, as a picture with a label for each row and column, or as a picture.
enum class Form { kNumbers, kLabelled, kPicture };

Form form_of(const MapSize &size, int64_t num_maps) {
  const int64_t longest = std::max(size.rows, size.columns);
  if (size.side > 1 || longest > kMostLabels) return Form::kPicture;
  return longest <= kMostNumbers && num_maps * size.cells() <= kMostNumberCells ? Form::kNumbers : Form::kLabelled;
}

std::string escaped(const std::string &words) {
  std::string out;
  for (const char c : one_line(words)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else
      out += c;
  }
  return out;
}

// For an attribute: no label has a blank in it.
std::string joined(const std::vector<std::string> &labels) {
  std::string out;
  for (const std::string &label : labels) out += (out.empty() ? "" : " ") + escaped(label);
  return out;
}

std::string replaced(std::string words, const std::string &from, const std::string &to) {
  for (size_t at = words.find(from); at != std::string::npos; at = words.find(from, at + to.size())) words.replace(at, from.size(), to);
  return words;
}

// Shapes and formulas, with signs that a terminal may lack.
std::string formula(const std::string &words) { return replaced(replaced(escaped(words), "-&gt;", "\u2192"), " x ", " \u00d7 "); }

std::string label_of(const std::vector<std::string> &labels, int64_t index) {
  return labels.empty() ? text(index + 1) : labels[static_cast<size_t>(index)];
}

// "row 3 (cat)", "rows 3 (cat), 4 and 17 more".
std::string rows_text(const std::vector<int64_t> &rows, const std::vector<std::string> &labels) {
  std::string out = rows.size() == 1 ? "Row " : "Rows ";
  for (size_t i = 0; i < std::min(rows.size(), kMostRowsNamed); ++i) {
    out += text(i == 0 ? "" : ", ", rows[i] + 1);
    if (!labels.empty()) out += " (" + label_of(labels, rows[i]) + ")";
  }
  if (rows.size() > kMostRowsNamed) out += text(" and ", rows.size() - kMostRowsNamed, " more");
  return out;
}

std::string weight_text(float weight, int decimals) {
  if (std::isnan(weight)) return "NaN";
  if (weight == AttentionMap::kMasked) return "masked";
  return decimal_text(static_cast<double>(weight), decimals);
}

// Each weight as a number.
std::string table_of(const AttentionMap &map, const ColourScale &scale, const Labels &labels) {
  const auto is_long = [](const std::string &label) { return label.size() > 4; };
  const bool is_wide = map.size.columns > 6 && std::any_of(labels.columns.begin(), labels.columns.end(), is_long);
  std::string out = "<div class=scroll><table class=\"weights" + std::string(map.size.columns > 5 ? " many" : "") + "\"><thead><tr" +
                    std::string(is_wide ? " class=upright" : "") + "><th></th>";
  for (int64_t column = 0; column < map.size.columns; ++column)
    out += "<th scope=col>" + escaped(label_of(labels.columns, column)) + "</th>";
  out += "</tr></thead><tbody>\n";
  for (int64_t row = 0; row < map.size.rows; ++row) {
    out += "<tr><th scope=row>" + escaped(label_of(labels.rows, row)) + "</th>";
    for (int64_t column = 0; column < map.size.columns; ++column) {
      const float cell = map.at(row, column);
      const std::string tip = escaped(label_of(labels.rows, row)) + " \u2192 " + escaped(label_of(labels.columns, column)) + ": ";
      out += "<td title=\"" + tip + weight_text(cell, 6) + "\"";
      if (std::isnan(cell)) {
        out += " class=nan>NaN</td>";
      } else if (cell == AttentionMap::kMasked) {
        out += " class=hatched></td>";
      } else {
        const double place = scale.place(static_cast<double>(cell));
        out += " style=\"background:" + css_colour(ColourScale::colour(place)) + ";color:" + (place < 0.6 ? "#fff" : "#111") + "\">" +
               weight_text(cell, 2) + "</td>";
      }
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>";
}

std::string spans(const std::vector<std::string> &labels, int64_t count) {
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += "<span>" + escaped(label_of(labels, i)) + "</span>";
  return out;
}

// A pixel for each cell.
std::string picture_of(const AttentionMap &map, Form form, const ColourScale &scale, const Labels &labels, int64_t num_keys, int64_t head) {
  const MapSize &size = map.size;
  std::vector<uint8_t> pixels;
  for (const float cell : map.cells) pixels.push_back(scale.number(cell));
  const std::string alt = text("Attention map of head ", head + 1, ", ", size.rows, " rows of ", size.columns, " cells");
  const std::string image = text("<div class=picture><img class=hatched tabindex=0 width=", size.columns, " height=", size.rows,
                                 " style=\"aspect-ratio:", size.columns, "/", size.rows, "\" alt=\"", alt, "\" src=\"",
                                 png_uri(size.columns, size.rows, ColourScale::palette(), pixels), "\"><i class=mark></i></div>");
  std::string out;
  if (form == Form::kLabelled) {
    out =
        text("<div class=scroll><div class=labelled style=\"--columns:", size.columns, ";--rows:", size.rows, "\"><div class=top>",
             spans(labels.columns, size.columns), "</div><div class=left>", spans(labels.rows, size.rows), "</div>", image, "</div></div>");
  } else {
    out = image + text("<div class=axis><span>1</span><span>keys \u2192, queries \u2193</span><span>", num_keys, "</span></div>");
  }
  return out + "\n<output aria-live=off></output>";
}

std::string tick(const ColourScale &scale, double weight, const std::string &words) {
  return "<li style=\"left:" + decimal_text(100 * scale.place(weight), 1) + "%\">" + words + "</li>";
}

// What the colours mean.
std::string legend_of(const ColourScale &scale, int64_t num_keys, bool has_masked, bool has_nan) {
  std::string out =
      "<div class=legend><div class=scale role=img aria-label=\"Colours of weights, from 0, dark, to 1, bright\"><div style=\"background:" +
      ColourScale::css_gradient() + "\"></div><ol aria-hidden=true>" + tick(scale, 0, "0");
  double last = 0;
  const auto add = [&](double weight, const std::string &words) {
    const double place = scale.place(weight);
    if (place < last + 0.1 || place > 0.92) return;  // too near to another
    out += tick(scale, weight, words);
    last = place;
  };
  if (num_keys > 4) add(1 / static_cast<double>(num_keys), text("1/", num_keys));
  for (const double weight : {0.01, 0.1, 0.25, 0.5}) add(weight, text(weight));
  out += tick(scale, 1, "1") + "</ol></div>";
  if (has_masked) out += "<span><i class=\"swatch hatched\"></i>masked</span>";
  if (has_nan) out += "<span><i class=\"swatch nan\"></i>NaN</span>";
  return out + "</div>\n";
}

// What the script has to know to name and read a cell of a picture.
std::string attributes_of(const Attention &attention, const MapSize &size, const ColourScale &scale, const Labels &labels) {
  std::string palette;
  const std::vector<Colour> colours = ColourScale::palette();
  for (size_t i = ColourScale::nan; i < colours.size(); ++i) palette += css_colour(colours[i]).substr(1);
  std::string out = text(" data-rows=", attention.q.rows, " data-columns=", attention.k.rows, " data-side=", size.side,
                         " data-power=", scale.power(), " data-palette=", palette);
  if (!labels.rows.empty()) out += " data-row-names=\"" + joined(labels.rows) + "\"";
  if (labels.columns == labels.rows) return out + " data-self=1";
  if (!labels.columns.empty()) out += " data-column-names=\"" + joined(labels.columns) + "\"";
  return out;
}

// The map of one head, with what there is to say about it.
std::string figure_of(const Attention &attention, int64_t head, const AttentionMap &map, Form form, const ColourScale &scale,
                      const Labels &labels) {
  std::string out = text("<figure class=map><figcaption><b>Head ", head + 1, "</b>");
  const int64_t sharing = attention.q.count / attention.k.count;
  if (sharing > 1) out += text(" <span>with key head ", head / sharing + 1, "</span>");
  if (map.spread > 0) {
    const std::string spread = decimal_text(map.spread, 1);
    out += " <span>spread over " + spread + (spread == "1.0" ? " key" : " keys");
    if (attention.is_self) out += ", " + decimal_text(map.distance, 1) + " tokens away";
    out += "</span>";
  }
  out += "</figcaption>";
  out += form == Form::kNumbers ? table_of(map, scale, labels) : picture_of(map, form, scale, labels, attention.k.rows, head);
  if (!map.rows_without_key.empty()) {
    out +=
        "<p class=alert>" + escaped(rows_text(map.rows_without_key, labels.rows)) + ": all keys are masked, so that all weights are 0.</p>";
  }
  if (!map.rows_with_nan.empty()) out += "<p class=alert>" + escaped(rows_text(map.rows_with_nan, labels.rows)) + ": NaN.</p>";
  return out + "</figure>\n";
}

}  // namespace

void HtmlPage::headline(const std::string &title, const std::string &sentence) {
  end_step();
  const bool is_first = title_.empty();
  if (is_first) title_ = title;
  const std::string tag = is_first ? "h1" : "h2";
  body_ += std::string("<header") + (is_first ? "" : " class=next") + "><" + tag + ">" + escaped(title) + "</" + tag + "><p>" +
           escaped(sentence) + "</p></header>\n";
}

void HtmlPage::maps(const Attention &attention, const Labels &labels) {
  end_step();
  const int64_t n_q = attention.q.rows, n_kv = attention.k.rows, heads = attention.q.count, drawn = std::min(heads, kMostMaps);
  const MapSize size = map_size(heads, n_q, n_kv);
  const Form form = form_of(size, drawn);
  const ColourScale scale(n_kv);
  std::string figures;
  bool has_masked = false, has_nan = false;
  for (int64_t head = 0; head < drawn; ++head) {
    progress_->step("map of head", head, drawn);
    const AttentionMap map = map_of(scores_of_head(attention, head), size);
    figures += figure_of(attention, head, map, form, scale, labels);
    has_masked = has_masked || std::count(map.cells.begin(), map.cells.end(), AttentionMap::kMasked) > 0;
    has_nan = has_nan || !map.rows_with_nan.empty();
  }

  const bool has_sinks = attention.call->score() != nullptr && attention.call->score()->sinks != nullptr;
  std::string about = text(drawn, drawn == 1 ? " attention map of " : " attention maps of ", n_q, " x ", n_kv, " weights");
  body_ +=
      "<section class=\"card maps\"" + (form == Form::kNumbers ? "" : attributes_of(attention, size, scale, labels)) +
      "><h2>What each head attends to</h2>\n<p class=why>A row for each token that looks, a column for each token that it may look at. "
      "The weights of a row sum to " +
      std::string(has_sinks ? "less than 1, for its sink has the rest." : "1.");
  if (n_kv > 4) body_ += " Small weights are stretched: an even share of all keys has a quarter of the colours.";
  body_ += "</p>\n";
  if (size.side > 1) {
    const std::string cells = text(size.rows, " x ", size.columns, " cells"), square = text(size.side, " x ", size.side);
    body_ += "<p>" +
             formula(text("Reduced: ", n_q, " x ", n_kv, " weights are too many to draw. Each of the ", cells, " is the mean of ", square,
                          " of them, masked ones left out.")) +
             "</p>\n";
    about += ", reduced to " + cells + ", each the mean of " + square;
  }
  if (drawn < heads) {
    body_ += text("<p>Drawn are the first ", drawn, " of ", heads, " heads.</p>\n");
    about += text(", of the first of ", heads, " heads");
  }
  if (about_.empty()) about_ = about;
  body_ += legend_of(scale, n_kv, has_masked, has_nan);
  const char *const width = drawn == 1 ? "620px" : drawn <= 4 ? "400px" : "270px";
  body_ += form == Form::kPicture ? text("<div class=grid style=\"--map:", width, "\">\n") : "<div class=row>\n";
  body_ += figures + "</div></section>\n";
}

void HtmlPage::step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) {
  end_step();
  body_ += "<section class=\"card step\"><h3><span class=number>" + escaped(number) + "</span>" + escaped(title) + " <code>" +
           formula(shapes) + "</code></h3><p class=why>" + escaped(why) + "</p>\n";
  is_in_step_ = true;
}

void HtmlPage::note(const std::string &sentence) { body_ += "<p>" + escaped(sentence) + "</p>\n"; }

void HtmlPage::blocks(const std::vector<Block> &blocks) {
  if (blocks.empty()) return;
  body_ += "<div class=blocks>";
  for (const Block &block : blocks) {
    if (block.cells.empty()) {
      body_ += "<span class=gap>\u22ef</span>";
      continue;
    }
    float largest = 0;
    for (const std::vector<Cell> &row : block.cells) {
      for (const Cell &cell : row) {
        if (std::isfinite(cell.number)) largest = std::max(largest, std::fabs(cell.number));
      }
    }
    body_ += "<figure class=matrix><figcaption>" + escaped(block.title) + "</figcaption><div class=scroll><table>";
    for (const std::vector<Cell> &row : block.cells) {
      body_ += "<tr>";
      for (const Cell &cell : row) {
        const int strength =
            largest > 0 && std::isfinite(cell.number) ? static_cast<int>(std::lround(32 * std::fabs(cell.number) / largest)) : 0;
        if (cell.is_gap)
          body_ += "<td class=no>\u22ef</td>";
        else if (cell.text == "-inf")
          body_ += "<td class=no>\u2212\u221e</td>";
        else if (strength == 0)
          body_ += "<td>" + escaped(cell.text) + "</td>";
        else
          body_ += std::string("<td class=") + (cell.number > 0 ? "up" : "down") + " style=--a:." + (strength < 10 ? "0" : "") +
                   text(strength) + ">" + escaped(cell.text) + "</td>";
      }
      body_ += "</tr>";
    }
    body_ += "</table></div></figure>\n";
  }
  body_ += "</div>\n";
}

void HtmlPage::end_step() {
  if (is_in_step_) body_ += "</section>\n";
  is_in_step_ = false;
}

std::string HtmlPage::html() const {
  const uint32_t version = mha_version();
  const std::string name = text("mha ", version / 10000, ".", version / 100 % 100, ".", version % 100);
  return "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n<meta name=viewport content=\"width=device-width, "
         "initial-scale=1\">\n"
         "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
         "script-src 'unsafe-inline'\">\n<meta name=generator content=\"" +
         name + "\">\n<link rel=icon href=\"data:,\">\n<title>" + escaped(title_) + "</title>\n<style>" + kStyle +
         "</style>\n</head>\n<body>\n<main>\n" + body_ + (is_in_step_ ? "</section>\n" : "") + "<footer>Written by " + name +
         ". In matrices, stronger shades are larger numbers, of either sign.</footer>\n</main>\n<script>" + kScript +
         "</script>\n</body>\n</html>\n";
}

}  // namespace command
