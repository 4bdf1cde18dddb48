//! The bindings of mha-sys equal mha.h: what the header's declarations are was asked of a C compiler and of the bindings (build.rs), and is
//! compared here.

/// The program in the README of the repository is one that compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::mem::{align_of, offset_of, size_of};

    include!(concat!(env!("OUT_DIR"), "/said_in_rust.rs"));

    extern "C" {
        fn said_in_c(index: i32) -> u64;
    }

    #[test]
    fn constants_sizes_alignments_and_offsets_are_those_of_the_header() {
        for (index, (name, in_rust)) in NUMBERS.iter().enumerate() {
            // SAFETY: a function without any precondition.
            let in_c = unsafe { said_in_c(index as i32) };
            assert_eq!(in_c, *in_rust, "{name} is {in_c} in mha.h and {in_rust} in the bindings");
        }
        println!("{} numbers about {} declarations", NUMBERS.len(), NAMES.len());
    }

    #[test]
    fn the_bindings_have_nothing_that_the_header_lacks() {
        let source = include_str!("../../mha-sys/src/lib.rs");
        let words = |line: &'static str| line.split(|c: char| !c.is_alphanumeric() && c != '_').collect::<Vec<_>>();
        let bound: BTreeSet<&str> = source
            .lines()
            .filter_map(|line| line.trim().strip_prefix("pub "))
            .map(words)
            .filter_map(|words| ["const", "type", "struct", "fn"].contains(&words[0]).then_some(words[1]))
            .collect();
        assert_eq!(bound, NAMES.iter().copied().collect());
    }

    #[test]
    fn types_are_those_of_the_header_and_every_function_is_in_the_library() {
        types(); // which compiles only if the types are, and links only if the functions are there
    }

    #[test]
    fn crates_and_header_have_one_version() {
        let version = format!("{}.{}.{}", mha_sys::MHA_VERSION_MAJOR, mha_sys::MHA_VERSION_MINOR, mha_sys::MHA_VERSION_PATCH);
        assert_eq!(version, env!("CARGO_PKG_VERSION"));
    }
}
