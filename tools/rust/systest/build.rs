//! Reads mha.h and writes two programs from it, one in C and one in Rust, which say the same about every declaration. src/main.rs compares what
//! they say. Where the bindings lack something, or have it with another type, the Rust program does not compile. The reader knows the few
//! forms of declaration that mha.h has, and stops at anything else: nothing of the header can be overlooked.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "src/header.rs"]
mod header;
use header::{Declaration, Field, Type};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap());
    // The header of the repository and not that of the library found: the bindings are committed beside it.
    let folder = package.join("../../../include");
    let path = folder.join("mha.h");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/header.rs");
    println!("cargo:rerun-if-changed={}", path.display());
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let declarations = header::read(&text);

    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    write(&out.join("said_in_c.c"), &c_program(&declarations));
    write(&out.join("said_in_rust.rs"), &rust_program(&declarations));
    cc::Build::new().file(out.join("said_in_c.c")).include(folder).compile("said_in_c");
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Numbers about a declaration, each with its name and its expression in C and in Rust.
fn numbers(declarations: &[Declaration]) -> Vec<[String; 3]> {
    let mut all = Vec::new();
    for declaration in declarations {
        match declaration {
            Declaration::Constant { name } => {
                all.push([name.clone(), name.clone(), format!("mha_sys::{name} as u64")]);
            }
            Declaration::Struct { name, fields } => {
                all.push([format!("sizeof {name}"), format!("sizeof({name})"), format!("size_of::<mha_sys::{name}>() as u64")]);
                all.push([format!("alignof {name}"), format!("_Alignof({name})"), format!("align_of::<mha_sys::{name}>() as u64")]);
                for field in fields.iter().map(|Field { name: field, .. }| field) {
                    let rust = format!("offset_of!(mha_sys::{name}, r#{field}) as u64");
                    all.push([format!("offsetof {name}.{field}"), format!("offsetof({name}, {field})"), rust]);
                }
            }
            _ => {}
        }
    }
    all
}

fn c_program(declarations: &[Declaration]) -> String {
    let mut text = String::from("#include <mha.h>\n\nunsigned long long said_in_c(int index) {\n  switch (index) {\n");
    for (index, [_, c, _]) in numbers(declarations).iter().enumerate() {
        writeln!(text, "    case {index}: return {c};").unwrap();
    }
    text + "    default: return ~0ull;\n  }\n}\n"
}

fn rust_program(declarations: &[Declaration]) -> String {
    let mut text = String::from("pub const NUMBERS: &[(&str, u64)] = &[\n");
    for [name, _, rust] in numbers(declarations) {
        writeln!(text, "    ({name:?}, {rust}),").unwrap();
    }
    text += "];\n\npub const NAMES: &[&str] = &[\n";
    for declaration in declarations {
        writeln!(text, "    {:?},", declaration.name()).unwrap();
    }
    text +=
        "];\n\n// Types: each line compiles only if the bindings have exactly this type.\n#[allow(unused, clippy::all)]\nfn types() {\n";
    for declaration in declarations {
        match declaration {
            Declaration::Constant { .. } | Declaration::Opaque { .. } => {}
            Declaration::Struct { name, fields } => {
                let list: Vec<String> = fields.iter().map(|field| format!("r#{}", field.name)).collect();
                // No "..": fields that the header does not have do not compile either.
                writeln!(text, "    |mha_sys::{name} {{ {} }}: mha_sys::{name}| {{", list.join(", ")).unwrap();
                for Field { name, kind } in fields {
                    writeln!(text, "        let _: {} = r#{name};", kind.rust()).unwrap();
                }
                text += "    };\n";
            }
            Declaration::Alias { name, kind } => {
                writeln!(text, "    |alias: mha_sys::{name}| {{ let _: {} = alias; }};", kind.rust()).unwrap();
            }
            Declaration::Function { name, kind } => {
                let Type::Function(..) = kind else { unreachable!() };
                writeln!(text, "    let function: {} = Some(mha_sys::{name}); std::hint::black_box(function);", kind.rust()).unwrap();
            }
        }
    }
    text + "}\n"
}
