//! The bindings of mha-sys are what bindgen makes of mha.h. They are committed, so that only this
//! crate needs libclang.

/// Where they are committed.
pub const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mha-sys/src/bindings.rs");

pub fn bindings() -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../..");
    bindgen::builder()
        .header(format!("{root}/include/mha.h"))
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
        .to_string()
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
