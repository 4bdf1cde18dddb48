//! The bindings of mha-sys are what bindgen makes of mha.h. They are committed, so that only this
//! crate needs libclang.

/// Where they are committed.
pub const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mha-sys/src/bindings.rs");

/// Makes Markdown of comments: shapes are code, and so are lines that stand to the right.
#[derive(Debug)]
struct Comments;

impl bindgen::callbacks::ParseCallbacks for Comments {
    fn process_comment(&self, comment: &str) -> Option<String> {
        let (mut text, mut is_code, mut is_shape) = (String::new(), false, false);
        for line in comment.lines().chain([""]) {
            if line.starts_with("   ") != is_code {
                text += if is_code { " ```\n" } else { " ```text\n" };
                is_code = !is_code;
            }
            for c in line.chars() {
                let (starts, ends) = (c == '[' && text.ends_with(' '), c == ']' && is_shape);
                text += if starts && !is_code { "`" } else { "" };
                text.push(c);
                text += if ends { "`" } else { "" };
                is_shape = (is_shape || starts && !is_code) && !ends;
            }
            text.push('\n');
        }
        let is_heading = comment.trim_start().starts_with("----");
        Some(if is_heading { String::new() } else { text.trim_end().to_string() })
    }
}

/// The same text with `///` in place of attributes, of at most 100 columns.
fn with_comments(bindings: &str) -> String {
    let mut text = String::new();
    for line in bindings.lines() {
        let start = &line[..line.len() - line.trim_start().len()];
        let doc = line.trim_start().strip_prefix("#[doc = \"");
        let Some(doc) = doc.and_then(|doc| doc.strip_suffix("\"]")) else {
            text += &format!("{line}\n");
            continue;
        };
        let doc = doc.replace("\\n", "\n").replace("\\\"", "\"").replace("\\\\", "\\");
        let (mut is_code, mut indent, mut filled) = (false, usize::MAX, String::new());
        for line in doc.lines().chain([""]) {
            let is_fence = line.starts_with(" ```");
            if !is_code && !is_fence && !line.is_empty() {
                for word in line.split_whitespace() {
                    if start.len() + filled.len() + word.len() > 95 {
                        text += &format!("{start}///{filled}\n");
                        filled.clear();
                    }
                    filled += &format!(" {word}");
                }
                continue;
            }
            if !filled.is_empty() {
                text += &format!("{start}///{}\n", std::mem::take(&mut filled));
            }
            let spaces = line.len() - line.trim_start().len();
            indent = if is_fence { usize::MAX } else { indent.min(spaces) }; // of the code
            let shown = if is_code && !is_fence { &line[indent - 1..] } else { line };
            text += &format!("{start}///{shown}\n");
            is_code ^= is_fence;
        }
        text.truncate(text.len() - start.len() - "///\n".len()); // of the last, empty line
    }
    text
}

pub fn bindings() -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../..");
    let bindings = bindgen::builder()
        .header(format!("{root}/include/mha.h"))
        .clang_arg("-fparse-all-comments") // the documentation of each item and field
        .parse_callbacks(Box::new(Comments))
        .allowlist_item("(mha|MHA)_.*")
        .raw_line("// What `cargo run -p systest` makes of mha.h.\n")
        .use_core()
        .ctypes_prefix("core::ffi")
        .rust_target(
            bindgen::RustTarget::stable(80, 0)
                .unwrap_or_else(|_| panic!("bindgen knows no Rust 1.80")),
        )
        .no_copy("mha_layer|mha_kv_cache")
        .derive_debug(false)
        .layout_tests(false)
        .merge_extern_blocks(true)
        .clang_macro_fallback()
        .clang_macro_fallback_build_dir(std::env::temp_dir())
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../../rustfmt.toml").into(),
        ))
        .disable_header_comment()
        .generate()
        .unwrap_or_else(|error| panic!("{error}"))
        .to_string();
    with_comments(&bindings)
}

/// The program in the README of the repository is one that compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../../../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    #[test]
    fn the_bindings_are_those_of_the_header() {
        let (committed, wanted) =
            (std::fs::read_to_string(super::FILE).unwrap(), super::bindings());
        let first =
            committed.lines().zip(wanted.lines()).find(|(committed, wanted)| committed != wanted);
        assert!(
            committed == wanted,
            "mha-sys/src/bindings.rs is not what mha.h says, from {first:?} on; run cargo run -p \
                systest in tools/bindings/rust"
        );
    }

    #[test]
    fn crates_and_header_have_one_version() {
        let version =
            [mha_sys::MHA_VERSION_MAJOR, mha_sys::MHA_VERSION_MINOR, mha_sys::MHA_VERSION_PATCH];
        assert_eq!(version.map(|number| number.to_string()).join("."), env!("CARGO_PKG_VERSION"));
    }
}
