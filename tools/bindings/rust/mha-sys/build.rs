//! Finds an installed mha, or builds the sources that come with this crate. README.md says which
//! variables steer it.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{exit, Command, Stdio};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if variable("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    // Even if an installed mha will be linked: a package made without the sources would build where
    // it is made, and nowhere else.
    let Some(source) = bundled_source() else {
        fail(
            "there are no sources in vendor/, where symbolic links lead to them; in a clone of the \
                repository type: git config core.symlinks true && \
             git checkout HEAD -- tools/bindings/rust/mha-sys/vendor",
        )
    };
    let is_static = cfg!(feature = "static") || is_set("MHA_STATIC");
    if let Some(folder) = variable("MHA_LIB_DIR") {
        return link_folder(Path::new(&folder), is_static);
    }
    if !is_set("MHA_NO_PKG_CONFIG") && link_installed(is_static) {
        return;
    }
    build_bundled(&source);
}

/// What the library is called for the target's linker, which on Windows takes a shared one by its
/// import library.
fn file_name(is_static: bool) -> &'static str {
    let target = |part| env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    match (target("OS").as_str(), target("ENV").as_str(), is_static) {
        (_, "msvc", _) => "mha.lib",
        (_, _, true) => "libmha.a",
        ("windows", ..) => "libmha.dll.a",
        ("macos", ..) => "libmha.dylib",
        _ => "libmha.so",
    }
}

/// A library where the user says it is.
fn link_folder(folder: &Path, is_static: bool) {
    let file = file_name(is_static);
    if !folder.join(file).is_file() {
        fail(&format!("MHA_LIB_DIR is {}, where there is no {file}", folder.display()));
    }
    let links = if is_static { None } else { links_to(folder) };
    println!("cargo:rustc-link-search=native={}", links.as_deref().unwrap_or(folder).display());
    println!("cargo:rustc-link-lib={}=mha", if is_static { "static" } else { "dylib" });
    println!("cargo:rerun-if-changed={}", folder.join(file).display());
    if !is_static {
        let has_static = folder.join(file_name(true)).is_file();
        println!(
            "cargo:warning=programs need {file} of {} when they run, and find it there only when \
                cargo runs them; otherwise set LD_LIBRARY_PATH or \
             an rpath, as the README of mha-sys shows{}",
            folder.display(),
            if has_static { ", or link the static library by MHA_STATIC=1" } else { "" }
        );
    }
    if let Some(include) = variable("MHA_INCLUDE_DIR") {
        println!("cargo:include={}", Path::new(&include).display());
    }
}

/// A folder of links to the shared library and its other names. It is in the target directory, so
/// programs that cargo runs look for libraries there.
#[cfg(unix)]
fn links_to(folder: &Path) -> Option<PathBuf> {
    let links = PathBuf::from(env::var_os("OUT_DIR")?).join("shared");
    let _ = fs::remove_dir_all(&links); // those of another folder
    fs::create_dir_all(&links).ok()?;
    for library in fs::read_dir(fs::canonicalize(folder).ok()?).ok()?.flatten() {
        let name = library.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("libmha.") && !name.ends_with(".a")) {
            std::os::unix::fs::symlink(library.path(), links.join(&name)).ok()?;
        }
    }
    Some(links)
}

#[cfg(not(unix))]
fn links_to(_folder: &Path) -> Option<PathBuf> {
    None
}

/// A library that pkg-config knows, of this version or a later one with the same binary interface.
#[cfg(feature = "pkg-config")]
fn link_installed(is_static: bool) -> bool {
    let mut probe = pkg_config::Config::new();
    // Before 1.0 the binary interface only grows, and so it does within a major version.
    probe
        .range_version(env!("CARGO_PKG_VERSION").."1")
        .statik(is_static)
        .cargo_metadata(!is_static);
    let Ok(library) = probe.probe("mha") else { return false };
    if is_static {
        // By itself: that crate links what is below /usr, such as in /usr/local/lib, as a shared
        // library whatever it is asked for.
        let Some(folder) =
            library.link_paths.iter().find(|folder| folder.join("libmha.a").is_file())
        else {
            return false;
        };
        println!("cargo:rustc-link-search=native={}", folder.display());
        println!("cargo:rustc-link-lib=static=mha");
    }
    if let Some(include) = library.include_paths.first() {
        println!("cargo:include={}", include.display());
    }
    true
}

#[cfg(not(feature = "pkg-config"))]
fn link_installed(_is_static: bool) -> bool {
    false
}

/// In the package vendor/, in the repository the tree itself.
fn bundled_source() -> Option<PathBuf> {
    let vendor = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?).join("vendor");
    fs::metadata(vendor.join("src/mha.map")).ok()?;
    let folder = fs::canonicalize(vendor.join("CMakeLists.txt")).ok()?.parent()?.to_path_buf();
    // On Windows a canonical path begins with \\?\, which CMake does not take.
    Some(
        folder
            .to_str()
            .and_then(|path| path.strip_prefix(r"\\?\"))
            .map(PathBuf::from)
            .unwrap_or(folder),
    )
}

/// The static library alone.
fn build_bundled(source: &Path) {
    for part in ["CMakeLists.txt", "include", "src"] {
        println!("cargo:rerun-if-changed={}", source.join(part).display());
    }
    let cmake = variable("CMAKE").unwrap_or_else(|| "cmake".into());
    if Command::new(&cmake).arg("--version").stdout(Stdio::null()).status().is_err() {
        fail(
            "building mha needs CMake 3.22 or newer (Debian: apt-get install cmake g++), or an \
            installed mha that pkg-config knows",
        );
    }

    let mut config = cmake::Config::new(source);
    for part in [
        "MHA_SHARED",
        "MHA_OPENBLAS",
        "MHA_PTHREADPOOL",
        "MHA_ONNX",
        "MHA_BINDINGS",
        "MHA_TESTS",
        "MHA_BENCH",
        "MHA_INSTALL",
    ] {
        config.define(part, "OFF");
    }
    if let Some(folder) = variable("MHA_XSIMD_INCLUDE_DIR") {
        config.define("MHA_XSIMD_INCLUDE_DIR", folder);
    }
    // Optimised in a debug build of the program too, and with the library's own flags for each
    // instruction set.
    config.profile("Release").no_default_flags(true).build_target("mha_static");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let Ok(_) = panic::catch_unwind(move || config.build()) else { fail(&why_cmake_failed(&out)) };

    let (lib, include, file) = (out.join("lib"), out.join("include"), file_name(true));
    // the second by Visual Studio
    let folders = ["build/src", "build/src/Release"].map(|folder| out.join(folder));
    let built = folders
        .iter()
        .map(|folder| folder.join(file))
        .find(|built| built.is_file())
        .unwrap_or_default();
    let copied = fs::create_dir_all(&lib)
        .and_then(|()| fs::create_dir_all(&include))
        .and_then(|()| fs::copy(built, lib.join(file)))
        .and_then(|_| {
            fs::read_dir(source.join("include"))?.try_for_each(|header| {
                let header = header?;
                fs::copy(header.path(), include.join(header.file_name())).map(|_| ())
            })
        });
    if let Err(error) = copied {
        fail(&format!("cannot copy the library that was built to {}: {error}", out.display()));
    }
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=static=mha");
    println!("cargo:root={}", out.display());
    println!("cargo:include={}", include.display());
}

fn why_cmake_failed(out: &Path) -> String {
    let cache = fs::read_to_string(out.join("build/CMakeCache.txt")).unwrap_or_default();
    if cache.contains("MHA_XSIMD_INCLUDE_DIR-NOTFOUND") {
        "building mha needs the headers of xsimd, which were not found. On Debian: apt-get install \
            libxsimd-dev; elsewhere set \
         MHA_XSIMD_INCLUDE_DIR to the folder that has xsimd/xsimd.hpp"
            .into()
    } else {
        "CMake could not build mha; what it said is above".into()
    }
}

fn variable(name: &str) -> Option<OsString> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var_os(name).filter(|value| !value.is_empty())
}

fn is_set(name: &str) -> bool {
    variable(name).is_some_and(|value| value != "0")
}

fn fail(sentence: &str) -> ! {
    eprintln!("mha-sys: {sentence}.");
    exit(1)
}
