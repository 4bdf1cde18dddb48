//! How many elements arrays have, by their shapes and strides.

use crate::{Error, ErrorKind, Result, Strides};

/// A dimension of an array: what its extent is called, and how many there are.
pub(crate) type Extent = (&'static str, usize);

/// That a contiguous array has exactly the elements of its shape.
pub(crate) fn check_exact(name: &str, len: usize, shape: &[Extent]) -> Result<()> {
    let needed = shape.iter().fold(1usize, |all, extent| all.saturating_mul(extent.1));
    if len == needed {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::SliceLength,
        format!("{name} has {len} elements; {} are {needed}", spelled(shape)),
    ))
}

/// That an array reaches over all elements of its shape with these strides, or is contiguous
/// without any. The innermost stride is 1; one that is 0 steps over all that is inside it.
pub(crate) fn check_lengths(
    name: &str, len: usize, strides: Option<Strides>, shape: &[Extent],
) -> Result<()> {
    let Some(Strides { batch, row, head }) = strides else { return check_exact(name, len, shape) };
    let mut strides = [batch, row, head];
    let strides = match shape.len() {
        2 => &mut strides[1..2],
        3 => &mut strides[..2],
        _ => &mut strides[..],
    };
    let (inner, outer) = shape.split_last().expect("arrays have dimensions");
    let mut inside = inner.1;
    for (stride, extent) in strides.iter_mut().zip(outer).rev() {
        *stride = if *stride == 0 { inside } else { *stride };
        inside = stride.saturating_mul(extent.1);
    }
    let is_empty = shape.iter().any(|extent| extent.1 == 0);
    let needed = strides.iter().zip(outer).fold(inner.1, |all, (stride, extent)| {
        all.saturating_add(extent.1.saturating_sub(1).saturating_mul(*stride))
    });
    if is_empty || len >= needed {
        return Ok(());
    }
    let message = format!(
        "{name} has {len} elements; {} with strides {strides:?} reach over {needed}",
        spelled(shape)
    );
    Err(Error::new(ErrorKind::SliceLength, message))
}

/// "[batch 2, n_q 4, query_dim 8]"
pub(crate) fn spelled(shape: &[Extent]) -> String {
    let extents: Vec<String> =
        shape.iter().map(|(name, extent)| format!("{name} {extent}")).collect();
    format!("[{}]", extents.join(", "))
}

/// How many rows of `row` elements each of `batch` sequences has in a contiguous array.
pub(crate) fn rows_of(name: &str, len: usize, batch: usize, row: usize) -> Result<usize> {
    let unit = batch.saturating_mul(row);
    if len.checked_rem(unit) == Some(0) {
        return Ok(len / unit);
    }
    if len == 0 {
        return Ok(0);
    }
    if batch == 0 {
        let message = format!(
            "batch is 0; set it to the number of sequences in {name}, which has {len} elements"
        );
        return Err(Error::new(ErrorKind::SliceLength, message));
    }
    let message = format!(
        "{name} has {len} elements, which is no whole number of rows for each of \
        {batch} sequences; a row has {row}"
    );
    Err(Error::new(ErrorKind::SliceLength, message))
}

/// A number of sequences or rows, as the library takes it.
pub(crate) fn extent(count: usize) -> i64 {
    match count {
        0 => mha_sys::MHA_EMPTY,
        _ => int(count),
    }
}

/// As the library takes it, which says by itself what is too large.
pub(crate) fn int(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A value, or the library's default for 0.
pub(crate) fn or(value: usize, default: usize) -> usize {
    if value == 0 {
        default
    } else {
        value
    }
}

/// A flag, or 0.
pub(crate) fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set {
        flag
    } else {
        0
    }
}
