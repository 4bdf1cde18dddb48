use std::any::Any;
use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{catch_unwind, resume_unwind};
use std::slice;

/// A matrix product of the caller's, to run the projections of a layer through a BLAS: [`LayerOptions::sgemm`](crate::LayerOptions::sgemm).
///
/// The results are then that BLAS's; the promises about bits hold for the library's own kernels. The projections use no
/// [`Scheduler`](crate::Scheduler). A panic continues in the caller of [`run`](crate::Forward::run), once the library has returned; outputs and
/// what was appended to a cache are worthless then.
///
/// ```
/// struct Plain;
///
/// impl mha::Sgemm for Plain {
///     fn sgemm(p: mha::Product<'_>) {
///         for row in 0..p.m {
///             for column in 0..p.n {
///                 let sum: f32 = (0..p.k).map(|i| p.a[row * p.lda + i] * p.b[i * p.ldb + column]).sum();
///                 let c = &mut p.c[row * p.ldc + column];
///                 *c = p.alpha * sum + if p.beta == 0.0 { 0.0 } else { p.beta * *c };
///             }
///         }
///     }
/// }
///
/// let options = mha::LayerOptions::new().sgemm::<Plain>();
/// let layer = mha::Layer::with_options(&mha::LayerConfig::new(4, 2), &mha::Weights::fused(&[1.0; 48]), &options)?;
/// let mut y = [0.0; 4];
/// layer.forward(&[1.0; 4], &mut y).run(&mut mha::Workspace::new())?;
/// assert_eq!(y, [4.0; 4]);
/// # Ok::<(), mha::Error>(())
/// ```
pub trait Sgemm {
    /// `c [m, n] = alpha * a [m, k] * b [k, n] + beta * c`, row-major, with `lda`, `ldb` and `ldc` elements from one row to the next. Where beta
    /// is 0, c is only written.
    fn sgemm(product: Product<'_>);
}

/// What [`Sgemm::sgemm`] is to compute.
#[derive(Debug)]
#[allow(missing_docs)] // the names of BLAS
pub struct Product<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: f32,
    pub a: &'a [f32],
    pub lda: usize,
    pub b: &'a [f32],
    pub ldb: usize,
    pub beta: f32,
    pub c: &'a mut [f32],
    pub ldc: usize,
}

thread_local! {
    /// What a product panicked with, until the library has returned: the library calls it on the thread that made the call.
    static PANIC: Cell<Option<Box<dyn Any + Send>>> = const { Cell::new(None) };
}

/// Has the type `mha_sgemm` of the C interface. Called by the library alone: row-major, nothing transposed.
pub(crate) unsafe extern "C" fn call<S: Sgemm>(
    _order: c_int,
    _trans_a: c_int,
    _trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    a: *const f32,
    lda: c_int,
    b: *const f32,
    ldb: c_int,
    beta: f32,
    c: *mut f32,
    ldc: c_int,
) {
    let [m, n, k, lda, ldb, ldc] = [m, n, k, lda, ldb, ldc].map(|size| usize::try_from(size).unwrap_or(0));
    let span = |rows: usize, columns: usize, stride: usize| if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns };
    let outcome = catch_unwind(|| {
        // SAFETY: the library gives matrices of these shapes, whose memory was initialised when it was allocated: rows, weights and outputs
        // by their owners, the workspace by this crate.
        let (a, b, c) = unsafe {
            (
                slice::from_raw_parts(a, span(m, k, lda)),
                slice::from_raw_parts(b, span(k, n, ldb)),
                slice::from_raw_parts_mut(c, span(m, n, ldc)),
            )
        };
        S::sgemm(Product { m, n, k, alpha, a, lda, b, ldb, beta, c, ldc });
    });
    if let Err(payload) = outcome {
        PANIC.set(Some(payload));
    }
}

/// Goes on with the panic of a product during the call that has just returned, if there was one.
pub(crate) fn resume_panic() {
    if let Some(payload) = PANIC.take() {
        resume_unwind(payload);
    }
}
