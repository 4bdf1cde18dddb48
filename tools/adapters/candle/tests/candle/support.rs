use candle_core::{DType, Device, Result, Tensor, D};

/// Numbers between -1 and 1.
pub fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count).map(move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

pub fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    let numbers: Vec<f32> =
        random(seed, shape.iter().product()).map(|number| 2.0 * number).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

pub fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bits(tensor: &Tensor) -> Vec<u32> {
    numbers(tensor).into_iter().map(f32::to_bits).collect()
}

/// Of the largest element.
pub fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (numbers(a), numbers(b));
    let largest = b.iter().fold(0.0, |largest: f32, number| largest.max(number.abs()));
    let apart = a.iter().zip(&b).fold(0.0, |apart: f32, (a, b)| {
        if (a - b).is_nan() {
            f32::NAN
        } else {
            apart.max((a - b).abs())
        }
    });
    apart / largest
}

pub fn assert_near(a: &Tensor, b: &Tensor, tolerance: f32) {
    let apart = difference(a, b);
    assert!(apart <= tolerance, "{apart} apart, more than {tolerance}");
}

/// Attention as candle's models write it, in double precision: `bias` is added to the scaled
/// scores, and the mask is in it.
pub fn plain_attention(
    q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, softcap: Option<f64>, bias: Option<&Tensor>,
) -> Result<Tensor> {
    let exact = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.contiguous();
    let group = q.dim(1)? / k.dim(1)?;
    let repeated = |tensor: &Tensor| {
        candle_transformers::utils::repeat_kv(exact(tensor)?, group)?.contiguous()
    };
    let mut scores = (exact(q)?.matmul(&repeated(k)?.t()?)? * scale)?;
    if let Some(softcap) = softcap {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    if let Some(bias) = bias {
        scores = scores.broadcast_add(&bias.to_dtype(DType::F64)?)?;
    }
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&repeated(v)?)
}

/// A bias of 0 where a query at this position attends to the key at that one, else -infinity:
/// `[rows, keys]`.
pub fn bias_where(
    rows: usize, keys: usize, offset: usize, attends: impl Fn(usize, usize) -> bool,
) -> Tensor {
    let number =
        |row: usize, key: usize| if attends(row + offset, key) { 0.0 } else { f32::NEG_INFINITY };
    let numbers: Vec<f32> = (0..rows)
        .flat_map(|row| (0..keys).map(move |key| (row, key)))
        .map(|(row, key)| number(row, key))
        .collect();
    Tensor::from_vec(numbers, (rows, keys), &Device::Cpu).unwrap()
}

pub fn in_pool<T: Send>(threads: usize, run: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

pub fn sentence<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.unwrap_err().to_string();
    // candle adds a backtrace where RUST_BACKTRACE is set
    error.lines().next().unwrap_or_default().to_owned()
}
