use mha::{
    AlignedBuffer, Arithmetic, Attention, BlockTables, CacheConfig, CacheKind, ErrorKind, KvCache,
    KvPool, Layer, LayerConfig, PoolParts, RopeConfig, Type, Weights, Workspace,
};

use crate::support::{assert_near, bits, error_of, layer, numbers, Alone};

const ROWS: usize = 50;

/// Feeds the rows in pieces of these lengths over a cache, in its sequence `sequence`.
fn decode(cache: &mut KvCache, sequence: i64, pieces: &[usize], window: Option<usize>) -> Vec<f32> {
    let (layer, x) = (layer(), numbers(ROWS * 32, 7));
    let rope = RopeConfig::new(layer.shape().head_dim).tables(ROWS).unwrap();
    let (mut y, mut workspace, mut row) = (vec![f32::NAN; ROWS * 32], Workspace::new(), 0);
    for piece in pieces.iter().cycle() {
        let end = ROWS.min(row + piece);
        let rows = row * 32..end * 32;
        let sequences = [sequence];
        let call = layer
            .forward(&x[rows.clone()], &mut y[rows])
            .causal()
            .rope(&rope)
            .cache(cache)
            .cache_sequences(&sequences);
        let call = if let Some(keys) = window { call.window_left(keys) } else { call };
        call.run(&mut workspace).unwrap();
        row = end;
        if row == ROWS {
            break;
        }
    }
    y
}

fn at_once(window: Option<usize>) -> Vec<f32> {
    let (layer, x) = (layer(), numbers(ROWS * 32, 7));
    let rope = RopeConfig::new(layer.shape().head_dim).tables(ROWS).unwrap();
    let mut y = vec![f32::NAN; ROWS * 32];
    let call = layer.forward(&x, &mut y).causal().rope(&rope);
    let call = if let Some(keys) = window { call.window_left(keys) } else { call };
    call.done();
    y
}

fn config(capacity: usize) -> CacheConfig {
    CacheConfig::for_layer(layer().shape(), capacity)
}

#[test]
fn a_cache_for_the_config_of_a_layer_is_one_for_its_shape() {
    let plain = LayerConfig::new(12, 3);
    let configs = [(plain, 36), (plain.head_dim(2), 18), (plain.num_kv_heads(1).head_dim_v(5), 21)];
    for (config, columns) in configs {
        let layer = Layer::new(&config, &Weights::fused(&numbers(12 * columns, 5))).unwrap();
        let cache = KvCache::new(&CacheConfig::for_layer(&config, 4)).unwrap();
        assert_eq!(
            cache.shape(),
            KvCache::new(&CacheConfig::for_layer(layer.shape(), 4)).unwrap().shape(),
            "{config:?}"
        );
    }
    let sentence = error_of(
        KvCache::new(&CacheConfig::for_layer(&LayerConfig::new(12, 0), 4)),
        ErrorKind::InvalidValue,
    );
    assert_eq!(sentence, "num_kv_heads is 0; set it to at least 1");
}

#[test]
fn a_cache_gives_the_bits_of_a_call_without_one_however_the_rows_are_cut() {
    let expected = bits(&at_once(None));
    for pieces in [&[ROWS][..], &[1], &[17, 3]] {
        let mut cache = KvCache::new(&config(ROWS)).unwrap();
        assert_eq!(bits(&decode(&mut cache, 0, pieces, None)), expected, "{pieces:?}");
        assert_eq!(cache.length(0).unwrap(), ROWS);
    }
}

#[test]
fn a_ring_gives_the_bits_of_a_window_without_one() {
    let mut ring = KvCache::new(&config(32).kind(CacheKind::Ring)).unwrap();
    assert_eq!(bits(&decode(&mut ring, 0, &[1], Some(20))), bits(&at_once(Some(20))));
    assert_eq!((ring.length(0).unwrap(), ring.shape().kind), (ROWS, CacheKind::Ring));
    error_of(ring.read(0, 0..1, None, Some(&mut [0.0; 16])), ErrorKind::InvalidValue);
    // overwritten since
}

#[test]
fn a_paged_cache_gives_the_same_bits_and_shares_a_prefix() {
    let mut paged = KvCache::new(
        &config(64).num_sequences(3).kind(CacheKind::Paged { block_positions: 16, num_blocks: 9 }),
    )
    .unwrap();
    paged.set_blocks(2, &[5, 0, 7, 2]).unwrap();
    assert_eq!(bits(&decode(&mut paged, 2, &[17, 3], None)), bits(&at_once(None)));
    paged.set_blocks(1, &[5, 0, 3]).unwrap();
    paged.copy_prefix(2, 1, 32).unwrap();
    assert_eq!(
        (paged.length(0).unwrap(), paged.length(1).unwrap(), paged.length(2).unwrap()),
        (0, 32, ROWS)
    );
    let (mut one, mut two) = ([0.0; 32 * 16], [0.0; 32 * 16]);
    paged.read(1, 0..32, Some(&mut one), None).unwrap();
    paged.read(2, 0..32, Some(&mut two), None).unwrap();
    assert_eq!(one, two);
    error_of(paged.set_blocks(1, &[9]), ErrorKind::InvalidValue);
}

#[test]
fn a_pool_gives_the_bits_of_a_paged_cache() {
    let (layer, x) = (layer(), numbers(34 * 32, 7));
    let kind = CacheKind::Paged { block_positions: 16, num_blocks: 6 };
    let config = config(32).num_sequences(3).k_type(Type::Int8).kind(kind);
    let mut cache = KvCache::new(&config).unwrap();
    for (sequence, blocks) in [&[4][..], &[0, 5], &[2]].into_iter().enumerate() {
        cache.set_blocks(sequence, blocks).unwrap();
    }
    let config = config.kind(CacheKind::Pool { block_positions: 16, num_blocks: 6 });
    let mut memory = AlignedBuffer::zeroed(6 * 1088).unwrap();
    memory.fill(0xCA);
    let parts = PoolParts::keys(0, 1088).values(256, 1088);
    let parts = parts.key_scales(768, 1088).value_scales(896, 1088);
    let mut pool = KvPool::new(&config, &mut memory, &parts).unwrap();
    let both =
        |rows: &[f32], sequences: &[i64], starts: &[i64], tables, cache: &mut _, pool: &mut _| {
            let (mut y, mut expected) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
            layer.forward(rows, &mut y).causal().cu_seqlens_q(starts).pool(pool, tables).done();
            let call = layer.forward(rows, &mut expected).causal().cu_seqlens_q(starts);
            call.cache(cache).cache_sequences(sequences).done();
            assert_eq!(bits(&y), bits(&expected));
        };
    let tables = [4, -1, 9, 0, 5, 9, 2, -1];
    let prompts = BlockTables::new(&[0; 3], &tables, 2).stride(3);
    both(&x, &[0, 1, 2], &[0, 9, 30, 34], prompts, &mut cache, &mut pool);
    let step = BlockTables::ragged(&[4, 21], &[2, 0, 5], &[0, 1, 3]);
    both(&x[..64], &[2, 1], &[0, 1, 2], step, &mut cache, &mut pool);
    let (mut y, mut weights) = ([0.0; 32], [0.0; 4 * 5]);
    let call = layer.forward(&x[..32], &mut y).attention_weights(&mut weights);
    call.pool_read(&pool, BlockTables::new(&[5], &[2], 1)).done();
    assert_eq!(pool.shape().v_type, Some(Type::Int8));
    for block in [1, 3] {
        assert!(memory[block * 1088..][..1088].iter().all(|&byte| byte == 0xCA));
    }
}

#[test]
fn memory_and_tables_that_are_too_short_for_a_pool_are_refused() {
    let (layer, x, mut y) = (layer(), numbers(64, 7), [7.0; 64]);
    let config =
        config(32).num_sequences(2).kind(CacheKind::Pool { block_positions: 16, num_blocks: 3 });
    let mut memory = AlignedBuffer::zeroed(3 * 3072).unwrap();
    let parts = PoolParts::keys(0, 3072).values(1024, 3072);
    let mut new = |config: CacheConfig, len: usize, parts: PoolParts, kind| {
        error_of(KvPool::new(&config, &mut memory[..len], &parts), kind)
    };
    let short = ErrorKind::SliceLength;
    let sentence =
        "values has 8191 elements; [num_blocks 3, bytes 2048] with strides [3072] reach \
        over 8192";
    assert_eq!(new(config, 9215, parts, short), sentence);
    new(config, 1024, PoolParts::keys(2048, 0), short);
    new(config, 9216, PoolParts::keys(0, usize::MAX), short);
    new(config, 9216, PoolParts::keys(0, 3072), ErrorKind::NullPointer);
    new(config, 9216, parts.values(512, 3072), ErrorKind::InvalidValue);
    new(config, 9216, parts.key_scales(0, 0), ErrorKind::InvalidValue);
    new(config.kind(CacheKind::Contiguous), 9216, parts, ErrorKind::InvalidValue);
    error_of(KvCache::new(&config), ErrorKind::InvalidValue);
    let mut pool = KvPool::new(&config, &mut memory, &parts).unwrap();
    let mut run =
        |tables, kind| layer.forward(&x, &mut y).batch(2).pool(&mut pool, tables).refused(kind);
    run(BlockTables::new(&[0], &[0, 1], 1), short);
    run(BlockTables::new(&[0, 0], &[0], 1), short);
    run(BlockTables::new(&[0, 0], &[0, 1, 2], 1).stride(3), short);
    run(BlockTables::ragged(&[0, 0], &[0, 1], &[0, 1]), short);
    run(BlockTables::ragged(&[0, 0], &[0, 1], &[0, 1, 3]), ErrorKind::InvalidValue);
    run(BlockTables::new(&[0, 0], &[0, 3], 1), ErrorKind::InvalidValue);
    run(BlockTables::new(&[0, 0], &[1, 1], 1), ErrorKind::CacheShared);
    assert_eq!(y, [7.0; 64]);
}

#[test]
fn a_shared_block_is_appended_to_only_once_it_has_been_copied() {
    let mut paged = KvCache::new(
        &CacheConfig::new(64, 1, 2)
            .num_sequences(2)
            .kind(CacheKind::Paged { block_positions: 16, num_blocks: 5 }),
    )
    .unwrap();
    paged.set_blocks(0, &[0, 1]).unwrap();
    paged.append(0, &[0.5; 2 * 20], &[0.25; 2 * 20]).unwrap();
    paged.set_blocks(1, &[0, 1]).unwrap();
    paged.copy_prefix(0, 1, 20).unwrap();
    let sentence = error_of(paged.append(1, &[2.0; 2], &[3.0; 2]), ErrorKind::CacheShared);
    assert!(sentence.contains("mha_kv_cache_unshare"), "{sentence}");
    error_of(paged.unshare(1, 5), ErrorKind::InvalidValue);
    error_of(paged.unshare(1, -1), ErrorKind::CacheFull);
    assert!(paged.unshare(1, 3).unwrap());
    assert!(
        !paged.unshare(1, -1).unwrap() && !paged.unshare(0, 4).unwrap(),
        "block 1 has one owner now"
    );
    paged.set_blocks(1, &[0, 3, 4]).unwrap();
    paged.append(1, &[2.0; 2], &[3.0; 2]).unwrap();
    paged.append(0, &[4.0; 2], &[5.0; 2]).unwrap();
    let mut k = [0.0; 4];
    for (sequence, last) in [(0, 4.0), (1, 2.0)] {
        paged.read(sequence, 19..21, Some(&mut k), None).unwrap();
        assert_eq!(k, [0.5, 0.5, last, last]);
    }
    error_of(KvCache::new(&config(16)).unwrap().unshare(0, 0), ErrorKind::InvalidValue);
}

#[test]
fn a_copy_of_a_cache_goes_on_where_it_was() {
    let expected = bits(&at_once(None));
    let mut cache = KvCache::new(&config(ROWS)).unwrap();
    decode(&mut cache, 0, &[20], None);
    cache.truncate(0, 20).unwrap();
    let (layer, x) = (layer(), numbers(ROWS * 32, 7));
    let rope = RopeConfig::new(layer.shape().head_dim).tables(ROWS).unwrap();
    for mut copy in [KvCache::copy_of(cache.as_bytes()).unwrap(), cache.try_clone().unwrap()] {
        let mut y = vec![0.0; 30 * 32];
        layer.forward(&x[20 * 32..], &mut y).causal().rope(&rope).cache(&mut copy).done();
        assert_eq!(bits(&y), expected[20 * 32..]);
    }
    assert_eq!(cache.length(0).unwrap(), 20);
}

#[test]
fn a_layer_of_w_q_alone_asks_the_cache_of_another() {
    let mut cache = KvCache::new(&config(ROWS)).unwrap();
    decode(&mut cache, 0, &[ROWS], None);
    let (w_q, w_o, query) = (numbers(32 * 32, 1), numbers(32 * 32, 4), numbers(3 * 32, 5));
    let weights = Weights::query_only(&w_q).output(&w_o);
    let asking = Layer::new(&LayerConfig::new(32, 4).num_kv_heads(2), &weights).unwrap();
    assert_eq!(
        (asking.shape().key_dim, asking.shape().value_dim, asking.shape().num_kv_heads),
        (0, 0, 2)
    );
    let (mut y, mut expected) = ([0.0; 96], [0.0; 96]);
    asking.forward(&query, &mut y).causal().cache_read(&cache).done();
    layer().forward(&query, &mut expected).causal().cache_read(&cache).done();
    assert_eq!(bits(&y), bits(&expected));
    let said = asking.forward(&query, &mut y).refused(ErrorKind::InvalidValue);
    assert!(said.starts_with("cache_read is NULL, but the layer has no W_K and W_V"), "{said}");
    let said = error_of(
        Layer::new(&LayerConfig::new(32, 4), &Weights::query_only(&w_q[..99])),
        ErrorKind::SliceLength,
    );
    assert_eq!(said, "w_q has 99 elements; [query_dim 32, num_heads * head_dim 32] are 1024");
}

#[test]
fn any_number_of_threads_attend_to_a_cache_that_is_only_read() {
    let layer = layer();
    let mut cache = KvCache::new(&config(ROWS)).unwrap();
    decode(&mut cache, 0, &[ROWS], None);
    let before = cache.as_bytes().to_vec();
    let query = numbers(32, 5);
    let results: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let one = |cache: &KvCache| {
            let (mut y, mut weights) = (vec![0.0; 32], vec![0.0; 4 * ROWS]);
            let call =
                layer.forward(&query, &mut y).cache_read(cache).attention_weights(&mut weights);
            call.done();
            y
        };
        let threads = [&cache, &cache, &cache].map(|cache| scope.spawn(move || one(cache)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| bits(result) == bits(&results[0])));
    assert_eq!(cache.as_bytes(), before);
    let key = numbers(32, 1);
    layer
        .forward(&query, &mut [0.0; 32])
        .cache_read(&cache)
        .key(&key)
        .refused(ErrorKind::InvalidValue);
}

#[test]
fn attention_alone_takes_keys_from_a_cache_but_does_not_write_to_one_that_is_only_read() {
    let (k, v, q) = (numbers(5 * 8, 1), numbers(5 * 8, 2), numbers(8, 3));
    let mut cache = KvCache::new(&CacheConfig::new(16, 2, 4)).unwrap();
    cache.append(0, &k[..24], &v[..24]).unwrap();
    let attention = Attention::new(2, 4);
    let (mut appended, mut read, mut plain) = ([0.0; 8], [0.0; 8], [0.0; 8]);
    attention.call(&q, &mut appended).key_value(&k[24..], &v[24..]).cache(&mut cache).done();
    attention.call(&q, &mut read).cache_read(&cache).done();
    attention.call(&q, &mut plain).key_value(&k, &v).done();
    assert_eq!((bits(&appended), bits(&read)), (bits(&plain), bits(&plain)));

    let bytes = cache.as_bytes().to_vec();
    attention
        .call(&q, &mut read)
        .key_value(&k, &v)
        .cache_read(&cache)
        .refused(ErrorKind::InvalidValue);
    assert_eq!(cache.as_bytes(), bytes);
}

#[test]
fn attention_without_keys_is_an_error_unless_there_are_said_to_be_none() {
    let (q, k, v) = (numbers(8, 1), numbers(2 * 8, 2), numbers(2 * 8, 3));
    let (attention, mut workspace) = (Attention::new(2, 4), Workspace::new());
    let mut cache = KvCache::new(&CacheConfig::new(16, 2, 4)).unwrap();
    cache.append(0, &k, &v).unwrap();
    let (mut y, mut states, mut chosen, mut read) = ([7.0; 8], [7.0; 12], [7], [0.0; 8]);
    let sentence = "key_value is not given; give it, or cache_read to attend to a cache alone, or \
        set n_kv to 0 for no keys";
    let said = error_of(attention.call(&q, &mut y).run(&mut workspace), ErrorKind::NullPointer);
    assert_eq!(said, sentence);
    let said = error_of(
        attention.call(&q, &mut y).cache(&mut cache).run(&mut workspace),
        ErrorKind::NullPointer,
    );
    assert_eq!(said, sentence);
    error_of(attention.call(&q, &mut y).workspace_bytes(), ErrorKind::NullPointer);
    error_of(attention.call_partials(&q, &mut states).run(&mut workspace), ErrorKind::NullPointer);
    let said = error_of(
        attention.choose_keys(&q, &[1.0; 2], 1, &mut chosen).run(&mut workspace),
        ErrorKind::NullPointer,
    );
    assert_eq!(said, sentence.replace("key_value", "key"));
    assert_eq!((y, states, chosen), ([7.0; 8], [7.0; 12], [7]));

    attention.call(&q, &mut read).cache_read(&cache).run(&mut workspace).unwrap();
    attention.call(&q, &mut y).n_kv(0).cache(&mut cache).run(&mut workspace).unwrap();
    assert_eq!(bits(&y), bits(&read));
    y = [7.0; 8];
    attention.call(&q, &mut y).key_value(&[], &[]).cache(&mut cache).run(&mut workspace).unwrap();
    assert_eq!((bits(&y), cache.length(0).unwrap()), (bits(&read), 2));
    attention.call(&q, &mut y).n_kv(0).run(&mut workspace).unwrap();
    assert_eq!(y, [0.0; 8]);
    y = [7.0; 8];
    attention.call(&q, &mut y).key_value(&[], &[]).run(&mut workspace).unwrap();
    assert_eq!(y, [0.0; 8]);
}

#[test]
fn a_call_appends_to_a_cache_or_only_reads_one() {
    let (layer, x, mut y) = (layer(), numbers(32, 1), [7.0; 32]);
    let (mut written, mut workspace) = (KvCache::new(&config(4)).unwrap(), Workspace::new());
    written.append(0, &[0.5; 16], &[0.25; 16]).unwrap();
    let read = written.try_clone().unwrap();
    let sentence = "cache and cache_read are both given; give one of them";
    let call = layer.forward(&x, &mut y).cache(&mut written).cache_read(&read);
    assert_eq!(error_of(call.run(&mut workspace), ErrorKind::InvalidValue), sentence);
    let call = layer.forward(&x, &mut y).cache_read(&read).cache(&mut written);
    assert_eq!(error_of(call.run(&mut workspace), ErrorKind::InvalidValue), sentence);
    let attention = Attention::new(4, 8).num_kv_heads(2);
    let call = attention.call(&x, &mut y).cache(&mut written).cache_read(&read);
    assert_eq!(error_of(call.info(), ErrorKind::InvalidValue), sentence);
    let (k, v) = ([1.0; 16], [1.0; 16]);
    let call = attention.call(&x, &mut y).key_value(&k, &v).cache_read(&read).cache(&mut written);
    assert_eq!(error_of(call.run(&mut workspace), ErrorKind::InvalidValue), sentence);
    assert_eq!((y, written.as_bytes()), ([7.0; 32], read.as_bytes()));
}

#[test]
fn what_is_appended_is_read_back() {
    for &kind in &Type::ALL[..5] {
        let k_type = if kind == Type::Int4 { Type::Int8 } else { kind };
        let mut cache =
            KvCache::new(&CacheConfig::new(16, 2, 4).head_dim_v(3).k_type(k_type).v_type(kind))
                .unwrap();
        assert_eq!(
            (cache.shape().k_type, cache.shape().v_type, cache.shape().head_dim_v),
            (k_type, Some(kind), 3)
        );
        let (k, v) = ([0.5; 2 * 8], [-2.0; 2 * 6]); // of which every type keeps the value
        cache.append(0, &k, &v).unwrap();
        let (mut k_back, mut v_back) = ([0.0; 16], [0.0; 12]);
        cache.read(0, 0..2, Some(&mut k_back), Some(&mut v_back)).unwrap();
        crate::support::assert_near(&k_back, &k, 1e-6);
        crate::support::assert_near(&v_back, &v, 1e-6);
        cache.read(0, 1..2, None, Some(&mut v_back[..6])).unwrap();
    }
}

#[test]
fn a_full_cache_is_an_error_and_stays_as_it_was() {
    let (layer, x) = (layer(), numbers(4 * 32, 1));
    let mut cache = KvCache::new(&config(3)).unwrap();
    layer.forward(&x[..64], &mut [0.0; 64]).causal().cache(&mut cache).done();
    let before = cache.as_bytes().to_vec();
    let mut y = [7.0; 64];
    layer.forward(&x[64..], &mut y).causal().cache(&mut cache).refused(ErrorKind::CacheFull);
    assert_eq!((cache.as_bytes(), y), (&before[..], [7.0; 64]));
}

#[test]
fn bytes_that_are_no_cache_are_an_error() {
    let mut cache = KvCache::new(&config(16)).unwrap();
    error_of(KvCache::copy_of(&cache.as_bytes()[..64]), ErrorKind::CacheFormat);
    error_of(KvCache::copy_of(&[0; 4096]), ErrorKind::CacheFormat);
    error_of(CacheConfig::new(usize::MAX, 1, 1).bytes(), ErrorKind::TooLarge);
    let sentence =
        error_of(CacheConfig::new(16, 1, 8).k_type(Type::Int4).bytes(), ErrorKind::InvalidValue);
    assert!(sentence.starts_with("k_type is 5; "), "{sentence}");
    error_of(cache.length(1), ErrorKind::InvalidValue);
    error_of(cache.truncate(0, 1), ErrorKind::InvalidValue);
    error_of(cache.set_blocks(0, &[0]), ErrorKind::InvalidValue);
}

#[test]
fn values_in_keys_are_the_first_elements_of_each_key() {
    let (q, k) = (numbers(3 * 2 * 8, 1), numbers(3 * 8, 2));
    let v: Vec<f32> = k.chunks(8).flat_map(|row| row[..4].to_vec()).collect();
    let config = CacheConfig::new(16, 1, 8).head_dim_v(4).values_in_keys(true);
    let (mut cache, mut workspace) = (KvCache::new(&config).unwrap(), Workspace::new());
    assert!(cache.shape().values_in_keys);
    let attention = Attention::new(2, 8).num_kv_heads(1).head_dim_v(4);
    let (mut y, mut expected) = ([0.0; 3 * 2 * 4], [0.0; 3 * 2 * 4]);
    attention.call(&q, &mut expected).key_value(&k, &v).run(&mut workspace).unwrap();
    cache.append(0, &k[..8], &[]).unwrap();
    attention.call(&q, &mut y).key(&k[8..]).cache(&mut cache).run(&mut workspace).unwrap();
    assert_eq!(y, expected);
    assert!(attention
        .call(&q, &mut y)
        .key_value(&k, &v)
        .cache(&mut cache)
        .run(&mut workspace)
        .is_err());
}

/// Attention of 3 rows for each of these sequences of a cache, of which each has 5 keys.
fn attend(arithmetic: Arithmetic, kinds: [Type; 2], sequences: &[i64]) -> mha::Result<Vec<f32>> {
    let (q, k, v) = (numbers(2 * 3 * 32, 1), numbers(2 * 5 * 16, 2), numbers(2 * 5 * 16, 3));
    let config = CacheConfig::new(5, 2, 8).num_sequences(2).k_type(kinds[0]).v_type(kinds[1]);
    let mut cache = KvCache::new(&config)?;
    for s in 0..2 {
        cache.append(s, &k[s * 80..][..80], &v[s * 80..][..80])?;
    }
    let mut y = vec![f32::NAN; sequences.len() * 96];
    let call = Attention::new(4, 8).num_kv_heads(2).call(&q[192 - y.len()..], &mut y);
    let call = call.batch(sequences.len()).cache_read(&cache).cache_sequences(sequences);
    call.attention_arithmetic(arithmetic).alone()?;
    Ok(y)
}

#[test]
fn attention_in_integers_is_near_that_in_floats_and_has_the_same_bits_in_any_batch() {
    use Arithmetic::{Bf16, Int16, F32};
    for values in [Type::Int8, Type::Int4] {
        let kinds = [Type::Int8, values];
        let [floats, integers] = [F32, Int16].map(|one| attend(one, kinds, &[0, 1]).unwrap());
        assert_near(&integers, &floats, 1e-3);
        assert_ne!(bits(&integers), bits(&floats));
        assert_eq!(bits(&attend(Int16, kinds, &[1]).unwrap()), bits(&integers[96..]));
    }
    let sentence = error_of(attend(Int16, [Type::F32, Type::Int8], &[0]), ErrorKind::InvalidValue);
    assert!(
        sentence.starts_with("attention_arithmetic is MHA_ARITHMETIC_INT16, but the cache stores"),
        "{sentence}"
    );
    let sentence = error_of(attend(Bf16, [Type::Int8; 2], &[0]), ErrorKind::InvalidValue);
    assert!(sentence.contains("MHA_ARITHMETIC_F32 (0) or MHA_ARITHMETIC_INT16"), "{sentence}");
    let (layer, x) = (layer(), numbers(5 * 32, 7));
    let [floats, integers] = [F32, Int16].map(|arithmetic| {
        let mut cache = KvCache::new(&config(5).k_type(Type::Int8)).unwrap();
        let mut y = vec![f32::NAN; 5 * 32];
        layer.forward(&x, &mut y).cache(&mut cache).attention_arithmetic(arithmetic).done();
        y
    });
    assert_near(&integers, &floats, 5e-3);
    assert_ne!(bits(&integers), bits(&floats));
}
