//! The same attention by candle's own operations, for tensors that the library does not serve.

use candle_core::{DType, Device, Result, Tensor, D};

use crate::attention::{Attention, Dimensions};
use crate::tensors;

/// As [`Attention::forward`], on any device, of any type of floats, and with gradients.
pub(crate) fn attention(options: &Attention, of: &Dimensions, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let dtype = q.dtype();
    let exact = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let heads_first = |tensor: &Tensor| if options.has_rows_first { tensor.transpose(1, 2) } else { Ok(tensor.clone()) };
    let of_queries = |tensor: &Tensor| {
        let tensor = heads_first(tensor)?.to_dtype(exact)?;
        let (batch, kv_heads, keys, width) = tensor.dims4()?;
        let group = (batch, kv_heads, of.heads / of.kv_heads, keys, width);
        tensor.unsqueeze(2)?.broadcast_as(group)?.reshape((batch, of.heads, keys, width))?.contiguous()
    };
    let (q, k, v) = (heads_first(q)?.to_dtype(exact)?.contiguous()?, of_queries(k)?, of_queries(v)?);

    let scale = options.scale.map_or(1.0 / (of.head_dim as f64).sqrt(), f64::from);
    let mut scores = (q.matmul(&k.t()?)? * scale)?;
    if let Some(softcap) = options.softcap.filter(|softcap| *softcap != 0.0) {
        scores = ((scores / f64::from(softcap))?.tanh()? * f64::from(softcap))?;
    }
    if let Some(slopes) = &options.alibi_slopes {
        let distances = numbers(options, of, |query, key| (key - query).abs() as f32, q.device())?.to_dtype(exact)?;
        let slopes = Tensor::from_slice(slopes, (1, of.heads, 1, 1), q.device())?.to_dtype(exact)?;
        scores = scores.broadcast_sub(&distances.broadcast_mul(&slopes)?)?;
    }
    if let Some(bias) = &options.bias {
        scores = (scores + tensors::broadcast_pairs(bias, of.pairs())?.to_dtype(exact)?)?;
    }
    let minus_infinity = Tensor::new(f32::NEG_INFINITY, q.device())?.to_dtype(exact)?.broadcast_as(scores.shape())?;
    if has_bounds(options) {
        let bounds = numbers(options, of, |query, key| if takes_part(options, query, key) { 1.0 } else { 0.0 }, q.device())?;
        scores = bounds.to_dtype(DType::U8)?.broadcast_as(scores.shape())?.where_cond(&scores, &minus_infinity)?;
    }
    if let Some(mask) = &options.mask {
        scores = tensors::broadcast_pairs(mask, of.pairs())?.to_dtype(DType::U8)?.where_cond(&scores, &minus_infinity)?;
    }
    if let Some(sinks) = &options.sinks {
        let sinks = Tensor::from_slice(sinks, (1, of.heads, 1, 1), q.device())?.to_dtype(exact)?;
        scores = Tensor::cat(&[&scores, &sinks.broadcast_as((of.batch, of.heads, of.n_q, 1))?], D::Minus1)?;
    }
    let mut weights = softmax(&scores)?;
    if options.sinks.is_some() {
        weights = weights.narrow(D::Minus1, 0, of.n_kv)?.contiguous()?;
    }
    let y = weights.matmul(&v)?.to_dtype(dtype)?;
    heads_first(&y)
}

/// Of the last dimension; 0 where all is -infinity.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    if scores.dim(D::Minus1)? == 0 {
        return Ok(scores.clone());
    }
    let largest = scores.max_keepdim(D::Minus1)?.detach().maximum(f64::from(f32::MIN))?;
    let weights = scores.broadcast_sub(&largest)?.exp()?;
    let sums = weights.sum_keepdim(D::Minus1)?;
    let is_empty = sums.detach().eq(0f64)?.to_dtype(sums.dtype())?;
    weights.broadcast_div(&(sums + is_empty)?)
}

fn has_bounds(options: &Attention) -> bool {
    let windows = options.window_left.is_some() || options.window_right.is_some();
    options.is_causal || windows || options.kv_lengths.is_some() || options.kv_starts.is_some()
}

/// Whether the query at this position attends to the key at that one, as far as bounds say; the positions of padding are far away.
fn takes_part(options: &Attention, query: i64, key: i64) -> bool {
    let behind = |keys: usize| query.saturating_sub(tensors::int(keys));
    let ahead = |keys: usize| query.saturating_add(tensors::int(keys));
    let in_window =
        options.window_left.is_none_or(|keys| key >= behind(keys)) && options.window_right.is_none_or(|keys| key <= ahead(keys));
    key != PADDING && in_window && (!options.is_causal || key <= query)
}

const PADDING: i64 = i64::MIN / 4;

/// A number for each query and key by their positions, `[batch or 1, 1, rows, keys]`.
fn numbers(options: &Attention, of: &Dimensions, number: impl Fn(i64, i64) -> f32, device: &Device) -> Result<Tensor> {
    let is_same = options.kv_lengths.is_none() && options.kv_starts.is_none();
    let batch = if is_same { 1 } else { of.batch };
    let (n_q, n_kv) = (tensors::int(of.n_q), tensors::int(of.n_kv));
    let mut all = Vec::with_capacity(batch * of.n_q * of.n_kv);
    for sequence in 0..batch {
        let first = options.kv_starts.as_ref().map_or(0, |starts| starts[sequence]);
        let length = options.kv_lengths.as_ref().map_or(n_kv - first, |lengths| lengths[sequence]);
        let start = options.offset.unwrap_or(length - n_q);
        for query in 0..n_q {
            let key = |key: i64| if (first..first + length).contains(&key) { key - first } else { PADDING };
            all.extend((0..n_kv).map(|row| number(start + query, key(row))));
        }
    }
    Tensor::from_vec(all, (batch, 1, of.n_q, of.n_kv), device)
}
