//! The arrays that callers lend to a call, and how the library takes them.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{null, null_mut};

use mha_sys as sys;

use crate::error::needs;
use crate::spans::{check_lengths, int, rows_of, Extent};
use crate::{Elements, ElementsMut, Error, ErrorKind, Result, Strides, Type};

/// An array that a call reads, if it is given, and its strides, if it is not contiguous.
#[derive(Clone, Copy, Default)]
pub(crate) struct Array<'a> {
    pub data: Option<Elements<'a>>,
    pub strides: Option<Strides>,
}

impl<'a> Array<'a> {
    pub fn of(data: Elements<'a>) -> Self {
        Self { data: Some(data), strides: None }
    }

    /// Checks that the array reaches over its shape, and that there are no strides without it.
    pub fn check(&self, name: &str, shape: &[Extent]) -> Result<()> {
        match (self.data, self.strides) {
            (Some(data), strides) => check_lengths(name, data.len(), strides, shape),
            (None, None) => Ok(()),
            (None, Some(_)) => needs((&format!("{name}_strides"), true), (name, false)),
        }
    }

    /// The rows of each sequence: as given, or as the length of a contiguous array says; 0 without
    /// an array.
    pub fn rows(
        &self, name: &str, count: &str, given: Option<usize>, batch: usize, width: usize,
    ) -> Result<usize> {
        match (given, self.data, self.strides) {
            (Some(given), ..) => Ok(given),
            (None, None, _) => Ok(0),
            (None, Some(data), None) => rows_of(name, data.len(), batch, width),
            _ => Err(Error::new(
                ErrorKind::InvalidValue,
                format!(
                    "{name} has strides, so that its length does not tell the rows; set {count}"
                ),
            )),
        }
    }

    pub fn raw(&self) -> sys::mha_input {
        raw_input(self.data, raw_strides(self.strides))
    }
}

/// An array that a call writes to, borrowed for 'a.
pub(crate) struct Output<'a> {
    start: *mut c_void,
    len: usize,
    kind: Type,
    pub strides: Option<Strides>,
    _borrowed: PhantomData<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    pub fn new(data: &'a mut [f32]) -> Self {
        Self::of(data.into())
    }

    pub fn of(data: ElementsMut<'a>) -> Self {
        let (start, len, kind) = match data {
            ElementsMut::F32(data) => (data.as_mut_ptr().cast(), data.len(), Type::F32),
            ElementsMut::F16(data) => (data.as_mut_ptr().cast(), data.len(), Type::F16),
            ElementsMut::Bf16(data) => (data.as_mut_ptr().cast(), data.len(), Type::Bf16),
        };
        Self { start, len, kind, strides: None, _borrowed: PhantomData }
    }

    /// Of positions of keys.
    pub fn of_keys(data: &'a mut [i32]) -> Self {
        let (start, len) = (data.as_mut_ptr().cast(), data.len());
        Self { start, len, kind: Type::F32, strides: None, _borrowed: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn check(&self, name: &str, shape: &[Extent]) -> Result<()> {
        check_lengths(name, self.len, self.strides, shape)
    }

    /// Where the array starts.
    pub fn start(&self) -> *mut c_void {
        self.start
    }

    pub fn raw(&self) -> sys::mha_output {
        let strides = raw_strides(self.strides);
        sys::mha_output { data: self.start, type_: self.kind.raw(), reserved: 0, strides }
    }
}

/// An input as the library takes it, if it is given.
pub(crate) fn raw_input(data: Option<Elements>, strides: sys::mha_strides) -> sys::mha_input {
    let (data, type_) = data.map_or((null(), 0), |data| (data.as_ptr(), data.kind().raw()));
    sys::mha_input { data, type_, reserved: 0, strides, reserved_pointer: null() }
}

fn raw_strides(strides: Option<Strides>) -> sys::mha_strides {
    let Strides { batch, row, head } = strides.unwrap_or_default();
    sys::mha_strides { batch: int(batch), row: int(row), head: int(head) }
}

/// Of an output that has floats.
pub(crate) fn output_ptr(output: &Option<Output>) -> *mut f32 {
    output.as_ref().map_or(null_mut(), |output| output.start.cast())
}

pub(crate) fn slice_ptr<T>(slice: Option<&[T]>) -> *const T {
    slice.map_or(null(), <[T]>::as_ptr)
}

pub(crate) fn struct_ptr<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(null(), std::ptr::from_ref)
}
