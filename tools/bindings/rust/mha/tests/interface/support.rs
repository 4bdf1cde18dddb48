use mha::{Layer, LayerConfig, Weights};

/// `count` numbers between -1 and 1 that look random.
pub fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761);
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

pub fn assert_near(values: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(values.len(), expected.len());
    for (index, (value, expected)) in values.iter().zip(expected).enumerate() {
        assert!(
            (value - expected).abs() <= tolerance,
            "element {index} is {value}, not {expected}"
        );
    }
}

/// A causal layer of some size: 32 wide, 4 query heads, 2 kv heads.
pub fn layer() -> Layer<'static> {
    let (w_q, w_k, w_v, w_o) =
        (numbers(32 * 32, 1), numbers(32 * 16, 2), numbers(32 * 16, 3), numbers(32 * 32, 4));
    Layer::new(
        &LayerConfig::new(32, 4).num_kv_heads(2),
        &Weights::new(&w_q, &w_k, &w_v).output(&w_o),
    )
    .unwrap()
}

/// The error that a result has to be, by its kind, and its sentence.
#[track_caller]
pub fn error_of<T>(result: mha::Result<T>, kind: mha::ErrorKind) -> String {
    match result {
        Ok(_) => panic!("this has to be an error: {kind:?}"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{error}");
            error.to_string()
        }
    }
}

/// Calls that run in a workspace of their own.
pub trait Alone: Sized {
    fn alone(self) -> mha::Result<()>;

    #[track_caller]
    fn done(self) {
        self.alone().unwrap();
    }

    #[track_caller]
    fn refused(self, kind: mha::ErrorKind) -> String {
        error_of(self.alone(), kind)
    }
}

macro_rules! alone {
    ($($call:ident)*) => {
        $(impl Alone for mha::$call<'_> {
            fn alone(self) -> mha::Result<()> {
                self.run(&mut mha::Workspace::new())
            }
        })*
    };
}
alone! { Forward AttentionCall RecurrentCall CausalConvCall Linear }
