//! Llama of candle-transformers generates the same tokens from the same random weights, as it is
//! published and as candle.patch makes it.

use std::collections::HashMap;

use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama as published;
use patched_transformers::models::{llama as patched, mha::Arithmetic};

/// A Llama with random weights, known to both crates by the JSON of its configuration.
struct Llama {
    json: String,
    config: published::Config,
    weights: HashMap<String, Tensor>,
}

fn llama([width, layers, heads, kv_heads, inner, vocabulary]: [usize; 6], more: &str) -> Llama {
    let json = format!(
        r#"{{"hidden_size": {width}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
              "num_key_value_heads": {kv_heads},
             "intermediate_size": {inner}, "vocab_size": {vocabulary}, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 1024{more}}}"#
    );
    let config: published::LlamaConfig = serde_json::from_str(&json).expect("a configuration");
    let config = config.into_config(false);
    Llama { json, weights: random_weights(&config).expect("weights"), config }
}

/// Numbers between -1 and 1.
fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count).map(move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// The tensors that a published model has variables for, of numbers that follow from their names.
fn random_weights(config: &published::Config) -> Result<HashMap<String, Tensor>> {
    let map = VarMap::new();
    published::Llama::load(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), config)?;
    let variables = map.data().lock().expect("no other thread");
    let random_tensor = |(name, variable): (&String, &Var)| {
        let (around, scale) = match variable.dims() {
            [_] => (1.0, 0.3), // of a norm
            _ if name.contains("embed_tokens") => (0.0, 1.0),
            shape => (0.0, 1.7 / (shape[1] as f32).sqrt()),
        };
        let seed = name.bytes().fold(17, |seed: u64, byte| seed.wrapping_mul(31) ^ u64::from(byte));
        let numbers = random(seed, variable.elem_count()).map(|number| around + scale * number);
        let tensor = Tensor::from_vec(numbers.collect(), variable.dims(), &Device::Cpu)?;
        Ok((name.clone(), tensor))
    };
    variables.iter().map(random_tensor).collect()
}

impl Llama {
    fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.weights.clone(), DType::F32, &Device::Cpu)
    }
}

/// A model by what it answers: the logits of the last token behind the tokens of a call, which
/// begin at this position.
type Model<'a> = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor> + 'a>;

fn of_published(llama: &Llama) -> Result<Model<'_>> {
    let model = published::Llama::load(llama.var_builder(), &llama.config)?;
    let new_cache = || published::Cache::new(true, DType::F32, &llama.config, &Device::Cpu);
    let mut cache = new_cache()?;
    Ok(Box::new(move |tokens, position| {
        if position == 0 {
            cache = new_cache()?;
        }
        model.forward(tokens, position, &mut cache)
    }))
}

fn of_mha(llama: &Llama, int8: Option<Arithmetic>) -> Result<Model<'_>> {
    let config: patched::LlamaConfig = serde_json::from_str(&llama.json).expect("a configuration");
    let config = config.into_config(false);
    let model = patched::Llama::load_packed(llama.var_builder(), &config, int8)?;
    let mut cache = patched::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    // The cache of mha forgets by itself what lies behind a position.
    Ok(Box::new(move |tokens, position| model.forward(tokens, position, &mut cache)))
}

struct Run {
    tokens: Vec<Vec<u32>>,
    logits: Vec<f32>, // behind the prompt
}

fn generate(model: &mut Model, prompt: &Tensor, count: usize) -> Result<Run> {
    let (mut next, mut position) = (prompt.clone(), 0);
    let mut run = Run { tokens: vec![], logits: vec![] };
    for _ in 0..=count {
        let logits = model(&next, position)?;
        position += next.dim(1)?;
        next = logits.argmax_keepdim(1)?;
        run.tokens.push(next.i((.., 0))?.to_vec1()?);
        if run.logits.is_empty() {
            run.logits = logits.flatten_all()?.to_vec1()?;
        }
    }
    Ok(run)
}

fn prompt(batch: usize, rows: usize, vocabulary: usize) -> Result<Tensor> {
    let ids = random(1, batch * rows)
        .map(|number| ((number + 1.0) / 2.0 * vocabulary as f32) as u32 % vocabulary as u32);
    Tensor::from_vec(ids.collect::<Vec<_>>(), (batch, rows), &Device::Cpu)
}

/// Of a model whose tokens are not all the same, as they are where embeddings are random and tied.
fn check(what: &str, expected: &Run, found: &Run, is_tied: bool) {
    let (a, b) = (&expected.tokens, &found.tokens);
    assert_eq!(a, b, "{what}: the patched engine generates other tokens");
    let mut different: Vec<u32> = a.iter().flatten().copied().collect();
    let count = different.len();
    different.sort_unstable();
    different.dedup();
    assert!(
        different.len() > count / 3 || is_tied,
        "{what}: only {} of {count} tokens are different",
        different.len()
    );
    eprintln!(
        "{what}: the same {count} tokens, {} of them different; logits apart by {:.1e}",
        different.len(),
        apart(expected, found)
    );
    assert!(apart(expected, found) < 1e-5);
}

/// The rms difference of the logits behind the prompt, relative to them.
fn apart(expected: &Run, found: &Run) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|value| value * value).sum::<f32>().sqrt()
    };
    norm(&mut expected.logits.iter().zip(&found.logits).map(|(a, b)| a - b))
        / norm(&mut expected.logits.iter().copied())
}

/// In int8 too, where no option is beside it.
fn compare(what: &str, shape: [usize; 6], more: &str, batch: usize) -> Result<()> {
    let (llama, prompt) = (llama(shape, more), prompt(batch, 40, shape[5])?);
    let run = |mut model: Model, count| generate(&mut model, &prompt, count);
    let expected = run(of_published(&llama)?, 64)?;
    check(what, &expected, &run(of_mha(&llama, None)?, 64)?, llama.config.tie_word_embeddings);
    if more.is_empty() && batch == 1 {
        let int8 = apart(&expected, &run(of_mha(&llama, Some(Arithmetic::Int8))?, 1)?);
        eprintln!("{what}, int8: logits apart by {int8:.1e}");
        assert!(int8 < 0.1);
    }
    Ok(())
}

fn main() -> Result<()> {
    compare("a model", [256, 4, 8, 8, 512, 1000], "", 1)?;
    compare("shared heads", [256, 4, 8, 2, 512, 1000], "", 1)?;
    compare("shared heads, three sequences", [256, 4, 8, 2, 512, 1000], "", 3)?;
    let tied = r#", "tie_word_embeddings": true"#;
    compare("tied embeddings", [256, 2, 4, 1, 512, 1000], tied, 1)?;
    let scaling = r#", "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                       "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 32}"#;
    compare("scaled rotation", [256, 3, 4, 2, 512, 1000], scaling, 1)
}
