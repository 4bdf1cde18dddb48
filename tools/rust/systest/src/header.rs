//! A reader of mha.h.

use std::iter::Peekable;
use std::vec::IntoIter;

pub enum Declaration {
    Constant { name: String },
    Opaque { name: String },
    Struct { name: String, fields: Vec<Field> },
    Alias { name: String, kind: Type },
    Function { name: String, kind: Type },
}

pub struct Field {
    pub name: String,
    pub kind: Type,
}

#[derive(Clone)]
pub enum Type {
    /// A word of C, such as "float" or "mha_error".
    Named(String),
    Pointer {
        to_const: bool,
        to: Box<Type>,
    },
    Array {
        of: Box<Type>,
        length: String,
    },
    Function(Vec<Type>, Box<Type>),
}

impl Declaration {
    pub fn name(&self) -> &str {
        match self {
            Self::Constant { name } | Self::Opaque { name } | Self::Struct { name, .. } => name,
            Self::Alias { name, .. } | Self::Function { name, .. } => name,
        }
    }
}

impl Type {
    /// The type that the bindings have to have.
    pub fn rust(&self) -> String {
        match self {
            Self::Named(name) => match name.as_str() {
                "void" => "core::ffi::c_void".into(),
                "char" => "core::ffi::c_char".into(),
                "int" => "core::ffi::c_int".into(),
                "float" => "f32".into(),
                "double" => "f64".into(),
                "size_t" => "usize".into(),
                "uint8_t" => "u8".into(),
                "int32_t" => "i32".into(),
                "int64_t" => "i64".into(),
                "uint32_t" => "u32".into(),
                "uint64_t" => "u64".into(),
                name if name.starts_with("mha_") => format!("mha_sys::{name}"),
                _ => panic!("mha.h has the type '{name}', which this test does not know"),
            },
            Self::Pointer { to_const, to } => format!("*{} {}", if *to_const { "const" } else { "mut" }, to.rust()),
            Self::Array { of, length } => format!("[{}; {length}]", of.rust()),
            Self::Function(parameters, result) => {
                let parameters: Vec<String> = parameters.iter().map(Self::rust).collect();
                let result = match &**result {
                    Self::Named(name) if name == "void" => "()".into(),
                    result => result.rust(),
                };
                format!("Option<unsafe extern \"C\" fn({}) -> {result}>", parameters.join(", "))
            }
        }
    }
}

/// All declarations of the header, in their order.
pub fn read(text: &str) -> Vec<Declaration> {
    let (constants, rest) = preprocess(&without_comments(text));
    let mut all: Vec<Declaration> = constants.into_iter().map(|name| Declaration::Constant { name }).collect();
    let mut tokens = Tokens(tokens(&rest).into_iter().peekable());
    while tokens.0.peek().is_some() {
        let declaration = tokens.declaration();
        all.push(declaration);
    }
    all
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let mut plain = parts.next().unwrap().to_string();
    for part in parts {
        let (_, code) = part.split_once("*/").expect("a comment of mha.h does not end");
        plain += code;
    }
    plain
}

/// The names of the constants, and the text between the directives. The wrapping of C++ and the definition of MHA_API go.
fn preprocess(text: &str) -> (Vec<String>, String) {
    let (mut constants, mut rest, mut in_cplusplus) = (Vec::new(), String::new(), false);
    for line in text.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["#ifdef", "__cplusplus"] => in_cplusplus = true,
            ["#endif"] if in_cplusplus => in_cplusplus = false,
            _ if in_cplusplus => {}
            ["#if" | "#ifdef" | "#ifndef" | "#elif" | "#else" | "#endif" | "#include", ..] => {}
            ["#define", "MHA_H"] | ["#define", "MHA_API", ..] => {}
            ["#define", name, value] if value == "INT64_MIN" || value.starts_with(|c: char| c.is_ascii_digit()) => {
                constants.push(name.to_string());
            }
            [word, ..] if word.starts_with('#') => panic!("mha.h has a directive that this test does not know: {line}"),
            _ => {
                rest += line;
                rest.push('\n');
            }
        }
    }
    (constants, rest)
}

fn tokens(text: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut in_word = false;
    for c in text.chars() {
        let is_word = c.is_ascii_alphanumeric() || c == '_';
        if is_word && in_word {
            all.last_mut().unwrap().push(c);
        } else if !c.is_whitespace() {
            all.push(c.to_string());
        }
        in_word = is_word;
    }
    all
}

struct Tokens(Peekable<IntoIter<String>>);

impl Tokens {
    fn next(&mut self) -> String {
        self.0.next().expect("mha.h ends within a declaration")
    }

    fn expect(&mut self, token: &str) {
        let next = self.next();
        assert_eq!(next, token, "in mha.h, '{next}' stands where this test knows only '{token}'");
    }

    fn take(&mut self, token: &str) -> bool {
        self.0.next_if(|next| next == token).is_some()
    }

    fn declaration(&mut self) -> Declaration {
        let declaration = if self.take("MHA_API") {
            let (name, kind) = self.declarator();
            Declaration::Function { name, kind }
        } else {
            self.expect("typedef");
            if self.take("struct") {
                self.struct_behind_typedef()
            } else {
                let (name, kind) = self.declarator();
                Declaration::Alias { name, kind }
            }
        };
        self.expect(";");
        declaration
    }

    fn struct_behind_typedef(&mut self) -> Declaration {
        let name = self.next();
        if !self.take("{") {
            self.expect(&name);
            return Declaration::Opaque { name };
        }
        let mut fields = Vec::new();
        while !self.take("}") {
            let (name, kind) = self.declarator();
            fields.push(Field { name, kind: kind.clone() });
            while self.take(",") {
                fields.push(Field { name: self.next(), kind: kind.clone() }); // "int64_t a, b"
            }
            self.expect(";");
        }
        self.expect(&name);
        Declaration::Struct { name, fields }
    }

    /// "float *x", "char message[248]", "mha_status f(int a)" or "void (*f)(int a)".
    fn declarator(&mut self) -> (String, Type) {
        let mut is_const = self.take("const");
        let mut kind = Type::Named(self.next());
        loop {
            if self.take("const") {
                is_const = true;
            } else if self.take("*") {
                kind = Type::Pointer { to_const: is_const, to: Box::new(kind) };
                is_const = false;
            } else {
                break;
            }
        }
        if self.take("(") {
            self.expect("*");
            let name = self.next();
            self.expect(")");
            self.expect("(");
            return (name, Type::Function(self.parameters(), Box::new(kind)));
        }
        let name = self.next();
        if self.take("[") {
            let length = self.next();
            self.expect("]");
            return (name, Type::Array { of: Box::new(kind), length });
        }
        if self.take("(") {
            return (name, Type::Function(self.parameters(), Box::new(kind)));
        }
        (name, kind)
    }

    /// What stands between "(" and ")".
    fn parameters(&mut self) -> Vec<Type> {
        if self.0.peek().is_some_and(|next| next == "void") {
            let mut rest = self.0.clone();
            rest.next();
            if rest.next().as_deref() == Some(")") {
                self.0 = rest;
                return Vec::new();
            }
        }
        let mut all = Vec::new();
        loop {
            all.push(self.declarator().1);
            if self.take(")") {
                return all;
            }
            self.expect(",");
        }
    }
}
