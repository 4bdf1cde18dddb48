use std::ffi::CStr;
use std::fmt;

use mha_sys as sys;

/// Enums whose first value is the default, and the library's numbers for them.
macro_rules! numbered {
    ($($(#[$text:meta])* pub enum $name:ident {
        $(#[$first_text:meta])* $first:ident = $first_raw:ident,
        $($(#[$each_text:meta])* $each:ident = $each_raw:ident,)*
    })*) => {
        $($(#[$text])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[non_exhaustive]
        pub enum $name {
            $(#[$first_text])* #[default] $first,
            $($(#[$each_text])* $each,)*
        }

        impl $name {
            /// All values, in the order of the library's numbers.
            pub const ALL: &'static [Self] = &[Self::$first, $(Self::$each,)*];

            pub(crate) fn raw(self) -> u32 {
                match self {
                    Self::$first => sys::$first_raw,
                    $(Self::$each => sys::$each_raw,)*
                }
            }

            /// None for one of a newer library.
            pub(crate) fn of_raw(raw: u32) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.raw() == raw)
            }
        })*
    };
}

numbered! {
    /// The type of stored numbers.
    pub enum Type {
        /// `f32`, 4 bytes.
        F32 = MHA_TYPE_F32,
        /// IEEE binary16, 2 bytes.
        F16 = MHA_TYPE_F16,
        /// The upper half of an `f32`, 2 bytes.
        Bf16 = MHA_TYPE_BF16,
        /// -127 to 127 times a scale; 1 byte.
        Int8 = MHA_TYPE_INT8,
        /// -8 to 7 times a scale; half a byte. Weights and cached values only.
        Int4 = MHA_TYPE_INT4,
        /// -16 to 15 times a scale; 5 bits. Packed weights only, in integer arithmetic.
        Int5 = MHA_TYPE_INT5,
        /// -32 to 31 times a scale; 6 bits. Packed weights only, in integer arithmetic.
        Int6 = MHA_TYPE_INT6,
    }

    /// The arithmetic of a layer's projections,
    /// [`LayerConfig::arithmetic`](crate::LayerConfig#structfield.arithmetic), and of attention,
    /// [`Forward::attention_arithmetic`](crate::Forward::attention_arithmetic), which computes in
    /// [`F32`](Self::F32) or [`Int16`](Self::Int16).
    pub enum Arithmetic {
        /// Floats.
        F32 = MHA_ARITHMETIC_F32,
        /// Input rows become 8-bit integers with a scale for 64 numbers or fewer, and their
        /// products with the weights' codes are summed exactly. Needs weights of [`Type::Int8`],
        /// [`Type::Int6`], [`Type::Int5`] or [`Type::Int4`].
        Int8 = MHA_ARITHMETIC_INT8,
        /// The same with 16-bit integers, whose error is small beside that of the weights.
        Int16 = MHA_ARITHMETIC_INT16,
        /// Input rows are rounded to bf16, and products are summed as floats: several times as
        /// fast with [`InstructionSet::AVX512_AMX`]. Needs weights of [`Type::Bf16`].
        Bf16 = MHA_ARITHMETIC_BF16,
    }

    /// A function of g: of the numbers of a gate, which multiply the context of a head element by
    /// element or as a whole, or of the beta of recurrent attention.
    pub enum Gate {
        /// No gate, and beta as it is.
        None = MHA_FUNCTION_NONE,
        /// `1 / (1 + exp(-g))`.
        Sigmoid = MHA_FUNCTION_SIGMOID,
        /// `ln(1 + exp(g))`.
        Softplus = MHA_FUNCTION_SOFTPLUS,
    }
}

/// An instruction set that the kernels are written for. All sets give the same bits.
///
/// # Examples
///
/// ```
/// use mha::InstructionSet;
///
/// assert!(InstructionSet::SCALAR.is_available());
/// let names: Vec<&str> = InstructionSet::available().map(InstructionSet::name).collect();
/// assert!(names.contains(&"scalar"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct InstructionSet(pub(crate) u32);

impl InstructionSet {
    /// The best set that this machine has.
    pub const AUTO: Self = Self(sys::MHA_INSTRUCTION_SET_AUTO);
    /// Any machine; slow.
    pub const SCALAR: Self = Self(sys::MHA_INSTRUCTION_SET_SCALAR);
    /// x86-64 with AVX2, FMA and F16C.
    pub const AVX2: Self = Self(sys::MHA_INSTRUCTION_SET_AVX2);
    /// x86-64 with AVX-512 F, CD, BW, VL and DQ.
    pub const AVX512: Self = Self(sys::MHA_INSTRUCTION_SET_AVX512);
    /// AArch64.
    pub const NEON: Self = Self(sys::MHA_INSTRUCTION_SET_NEON);
    /// [`AVX2`](Self::AVX2) with AVX-VNNI. This set and the next five differ from the others only
    /// in integer and bf16 arithmetic.
    pub const AVX2_VNNI: Self = Self(sys::MHA_INSTRUCTION_SET_AVX2_VNNI);
    /// [`AVX512`](Self::AVX512) with its VNNI.
    pub const AVX512_VNNI: Self = Self(sys::MHA_INSTRUCTION_SET_AVX512_VNNI);
    /// [`NEON`](Self::NEON) with FEAT_DotProd.
    pub const NEON_DOTPROD: Self = Self(sys::MHA_INSTRUCTION_SET_NEON_DOTPROD);
    /// [`NEON_DOTPROD`](Self::NEON_DOTPROD) with FEAT_I8MM.
    pub const NEON_I8MM: Self = Self(sys::MHA_INSTRUCTION_SET_NEON_I8MM);
    /// [`AVX512_VNNI`](Self::AVX512_VNNI) with AVX-512 BF16.
    pub const AVX512_BF16: Self = Self(sys::MHA_INSTRUCTION_SET_AVX512_BF16);
    /// [`AVX512_VNNI`](Self::AVX512_VNNI) with AMX for bf16, on Linux in a process that asked for
    /// it before the first call: `libc::syscall(libc::SYS_arch_prctl, 0x1023, 18)`.
    pub const AVX512_AMX: Self = Self(sys::MHA_INSTRUCTION_SET_AVX512_AMX);
    /// WebAssembly with SIMD; slow in floats.
    pub const WASM_SIMD128: Self = Self(sys::MHA_INSTRUCTION_SET_WASM_SIMD128);
    /// WebAssembly with relaxed SIMD, where the engine fuses multiply-adds.
    pub const WASM_RELAXED: Self = Self(sys::MHA_INSTRUCTION_SET_WASM_RELAXED);
    /// [`WASM_RELAXED`](Self::WASM_RELAXED) with dot products of signed bytes.
    pub const WASM_SIGNED_DOT: Self = Self(sys::MHA_INSTRUCTION_SET_WASM_SIGNED_DOT);
    /// [`WASM_RELAXED`](Self::WASM_RELAXED) with dot products of unsigned bytes.
    pub const WASM_UNSIGNED_DOT: Self = Self(sys::MHA_INSTRUCTION_SET_WASM_UNSIGNED_DOT);
    /// 64-bit RISC-V with vectors.
    pub const RVV: Self = Self(sys::MHA_INSTRUCTION_SET_RVV);

    /// Returns the sets that the library contains and this machine can run.
    pub fn available() -> impl Iterator<Item = Self> {
        // SAFETY: no precondition.
        let sets = unsafe { sys::mha_instruction_sets() };
        (0..32).filter(move |bit| sets >> bit & 1 == 1).map(Self)
    }

    /// Returns whether the library contains the set and this machine can run it; always true for
    /// [`AUTO`](Self::AUTO).
    pub fn is_available(self) -> bool {
        self == Self::AUTO || Self::available().any(|set| set == self)
    }

    /// Returns "auto", "scalar", "avx512_vnni" and so on, or "unknown".
    pub fn name(self) -> &'static str {
        // SAFETY: takes any number, and returns a static string.
        unsafe { CStr::from_ptr(sys::mha_instruction_set_name(self.0)) }
            .to_str()
            .unwrap_or("unknown")
    }
}

impl fmt::Debug for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InstructionSet({})", self.name())
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Numbers that a call reads, of any type. Slices, arrays and vectors of `f32` convert into it. f16
/// and bf16 are given by their bits; the crate `half` reinterprets slices of its types as such.
///
/// # Examples
///
/// ```
/// use mha::{Attention, Elements, Workspace};
///
/// let (q, ones, mut output) = ([1.0; 2], [0x3c00; 3 * 2], [0.0; 2]); // 1 in binary16
/// let call = Attention::new(1, 2).call(&q, &mut output);
/// call.key_value(Elements::F16(&ones), Elements::F16(&ones)).run(&mut Workspace::new())?;
/// assert_eq!(output, [1.0; 2]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Elements<'a> {
    /// Floats.
    F32(&'a [f32]),
    /// The bits of IEEE binary16 numbers.
    F16(&'a [u16]),
    /// The bits of bfloat16 numbers.
    Bf16(&'a [u16]),
    /// Codes of 8 bits, to be multiplied by scales.
    Int8(&'a [i8]),
    /// Codes of 4 bits, to be multiplied by scales: two in a byte, each plus 8, the earlier one in
    /// the low half.
    Int4(&'a [u8]),
}

impl Elements<'_> {
    pub(crate) fn kind(&self) -> Type {
        match self {
            Self::F32(_) => Type::F32,
            Self::F16(_) => Type::F16,
            Self::Bf16(_) => Type::Bf16,
            Self::Int8(_) => Type::Int8,
            Self::Int4(_) => Type::Int4,
        }
    }

    /// Elements of the slice; of int4 bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F16(data) | Self::Bf16(data) => data.len(),
            Self::Int8(data) => data.len(),
            Self::Int4(data) => data.len(),
        }
    }

    pub(crate) fn as_ptr(&self) -> *const std::ffi::c_void {
        match self {
            Self::F32(data) => data.as_ptr().cast(),
            Self::F16(data) | Self::Bf16(data) => data.as_ptr().cast(),
            Self::Int8(data) => data.as_ptr().cast(),
            Self::Int4(data) => data.as_ptr().cast(),
        }
    }
}

/// Numbers that a call writes. Slices, arrays and vectors of `f32` convert into it. f16 and bf16
/// are written as their bits.
///
/// # Examples
///
/// ```
/// use mha::{Attention, ElementsMut, Workspace};
///
/// let (q, kv, mut output) = ([1.0; 2], [1.0; 3 * 2], [0; 2]);
/// let call = Attention::new(1, 2).call(&q, ElementsMut::Bf16(&mut output));
/// call.key_value(&kv, &kv).run(&mut Workspace::new())?;
/// assert_eq!(output, [0x3f80; 2]); // 1 in bfloat16
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum ElementsMut<'a> {
    /// Floats.
    F32(&'a mut [f32]),
    /// The bits of IEEE binary16 numbers.
    F16(&'a mut [u16]),
    /// The bits of bfloat16 numbers.
    Bf16(&'a mut [u16]),
}

macro_rules! from_floats {
    ($($elements:ident $of:ty, ($($generics:tt)*);)*) => {
        $(impl<'a, $($generics)*> From<$of> for $elements<'a> {
            fn from(data: $of) -> Self {
                Self::F32(data)
            }
        })*
    };
}

from_floats! {
    Elements &'a [f32], ();
    Elements &'a Vec<f32>, ();
    Elements &'a [f32; N], (const N: usize);
    ElementsMut &'a mut [f32], ();
    ElementsMut &'a mut Vec<f32>, ();
    ElementsMut &'a mut [f32; N], (const N: usize);
}
