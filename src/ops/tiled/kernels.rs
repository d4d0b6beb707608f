//! Attention and its gradients, a tile of scores at a time (Dao, 2023): the matrix of all scores never exists.
//!
//! The forward makes the scores twice, first for the log-sum-exps and then for the output: so the output's sums need
//! no correction while they grow, and can stay in the registers of the tensor cores. Tokens of all rows lie behind one
//! another; `first_key` and `last_query` say how far each looks and is looked at within its document.

use cubecl::prelude::*;

use super::tile::{Tiles, add_product, load, load_row, score, store, sums, visible};

/// Where the first tile of keys starts that a tile of queries looks at.
#[cube]
fn first_tile(first: usize, first_key: &[i32], window: usize, #[comptime] t: Tiles) -> usize {
    let mut key = first_key[first] as usize;
    if first + 1 > window + key {
        key = first + 1 - window;
    }
    key / t.side * t.side
}

/// Output and log-sum-exps of a tile of queries of one head.
#[cube(launch_unchecked)]
pub(super) fn forward<E: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    first_key: &[i32],
    o: &mut [E],
    lse: &mut [f32],
    tokens: usize,
    window: usize,
    scale: f32,
    #[comptime] t: Tiles,
) {
    let first = CUBE_POS_X as usize * t.side;
    let head = CUBE_POS_Y as usize;
    let kv_head = head / comptime!(t.num_heads / t.num_kv_heads);
    let mut q_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut k_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut scores = Shared::new_slice(comptime!(t.side * t.side));
    let mut max = Shared::new_slice(comptime!(t.side * t.lanes));
    let mut sum = Shared::new_slice(comptime!(t.side * t.lanes));
    let mut v_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut weights = Shared::new_slice(comptime!(t.side * t.side));
    let mut out = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut row_lse = Shared::new_slice(comptime!(t.side));
    load::<E>(q, &mut q_tile, first, tokens, t.num_heads, head, t);
    let slots = comptime!(t.side * t.lanes);
    let columns = comptime!(t.side / t.lanes);
    let mut slot = UNIT_POS as usize;
    while slot < slots {
        max[slot] = f32::new(-1e30);
        sum[slot] = 0.0f32;
        slot += t.units;
    }
    let first_tile = first_tile(first, first_key, window, t);
    let mut key = first_tile;
    while key < first + t.side && key < tokens {
        load::<E>(k, &mut k_tile, key, tokens, t.num_kv_heads, kv_head, t);
        sync_cube();
        score::<E>(&q_tile, &k_tile, &mut scores, t);
        sync_cube();
        let mut slot = UNIT_POS as usize;
        while slot < slots {
            let row = slot / t.lanes;
            let from = slot % t.lanes * columns;
            let mut m = max[slot];
            for c in from..from + columns {
                if visible(first + row, key + c, first_key, tokens, window) {
                    m = m.max(scores[row * t.side + c] * scale);
                }
            }
            let mut s = sum[slot] * (max[slot] - m).exp();
            for c in from..from + columns {
                if visible(first + row, key + c, first_key, tokens, window) {
                    s += (scores[row * t.side + c] * scale - m).exp();
                }
            }
            max[slot] = m;
            sum[slot] = s;
            slot += t.units;
        }
        key += t.side;
    }
    sync_cube();
    let mut row = UNIT_POS as usize;
    while row < t.side {
        let mut m = max[row * t.lanes];
        for lane in 1..t.lanes {
            m = m.max(max[row * t.lanes + lane]);
        }
        let mut s = 0.0f32;
        for lane in 0..t.lanes {
            s += sum[row * t.lanes + lane] * (max[row * t.lanes + lane] - m).exp();
        }
        row_lse[row] = m + s.ln();
        if first + row < tokens {
            lse[(first + row) * t.num_heads + head] = m + s.ln();
        }
        row += t.units;
    }
    let fragments = sums(&mut out, t);
    let mut key = first_tile;
    while key < first + t.side && key < tokens {
        sync_cube();
        load::<E>(k, &mut k_tile, key, tokens, t.num_kv_heads, kv_head, t);
        load::<E>(v, &mut v_tile, key, tokens, t.num_kv_heads, kv_head, t);
        sync_cube();
        score::<E>(&q_tile, &k_tile, &mut scores, t);
        sync_cube();
        let mut e = UNIT_POS as usize;
        while e < t.side * t.side {
            let row = e / t.side;
            let mut weight = 0.0f32;
            if visible(first + row, key + e % t.side, first_key, tokens, window) {
                weight = (scores[e] * scale - row_lse[row]).exp();
            }
            weights[e] = E::cast_from(weight);
            e += t.units;
        }
        sync_cube();
        add_product::<E>(&weights, &v_tile, &fragments, &mut out, false, t);
        key += t.side;
    }
    store::<E>(&fragments, &mut out, o, first, tokens, t.num_heads, head, t);
}

/// Gradient of the queries of a tile of one head.
#[cube(launch_unchecked)]
pub(super) fn backward_queries<E: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    d_o: &[E],
    lse: &[f32],
    delta: &[f32],
    first_key: &[i32],
    dq: &mut [E],
    tokens: usize,
    window: usize,
    scale: f32,
    #[comptime] t: Tiles,
) {
    let first = CUBE_POS_X as usize * t.side;
    let head = CUBE_POS_Y as usize;
    let kv_head = head / comptime!(t.num_heads / t.num_kv_heads);
    let mut q_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut k_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut v_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut d_o_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut scores = Shared::new_slice(comptime!(t.side * t.side));
    let mut d_weights = Shared::new_slice(comptime!(t.side * t.side));
    let mut d_scores = Shared::new_slice(comptime!(t.side * t.side));
    let mut row_lse = Shared::new_slice(comptime!(t.side));
    let mut row_delta = Shared::new_slice(comptime!(t.side));
    let mut out = Shared::new_slice(comptime!(t.side * t.head_dim));
    load::<E>(q, &mut q_tile, first, tokens, t.num_heads, head, t);
    load::<E>(d_o, &mut d_o_tile, first, tokens, t.num_heads, head, t);
    load_row(lse, &mut row_lse, first, tokens, head, t);
    load_row(delta, &mut row_delta, first, tokens, head, t);
    let fragments = sums(&mut out, t);
    let mut key = first_tile(first, first_key, window, t);
    while key < first + t.side && key < tokens {
        sync_cube();
        load::<E>(k, &mut k_tile, key, tokens, t.num_kv_heads, kv_head, t);
        load::<E>(v, &mut v_tile, key, tokens, t.num_kv_heads, kv_head, t);
        sync_cube();
        score::<E>(&q_tile, &k_tile, &mut scores, t);
        score::<E>(&d_o_tile, &v_tile, &mut d_weights, t);
        sync_cube();
        let mut e = UNIT_POS as usize;
        while e < t.side * t.side {
            let row = e / t.side;
            let mut d_score = 0.0f32;
            if visible(first + row, key + e % t.side, first_key, tokens, window) {
                let weight = (scores[e] * scale - row_lse[row]).exp();
                d_score = weight * (d_weights[e] - row_delta[row]) * scale;
            }
            d_scores[e] = E::cast_from(d_score);
            e += t.units;
        }
        sync_cube();
        add_product::<E>(&d_scores, &k_tile, &fragments, &mut out, false, t);
        key += t.side;
    }
    store::<E>(&fragments, &mut out, dq, first, tokens, t.num_heads, head, t);
}

/// Gradients of the keys and values of a tile of one key-value head, summed over the queries' heads.
#[cube(launch_unchecked)]
pub(super) fn backward_keys<E: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    d_o: &[E],
    lse: &[f32],
    delta: &[f32],
    first_key: &[i32],
    last_query: &[i32],
    dk: &mut [E],
    dv: &mut [E],
    tokens: usize,
    window: usize,
    scale: f32,
    #[comptime] t: Tiles,
) {
    let first = CUBE_POS_X as usize * t.side;
    let kv_head = CUBE_POS_Y as usize;
    let group = comptime!(t.num_heads / t.num_kv_heads);
    let mut q_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut k_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut v_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut d_o_tile = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut scores = Shared::new_slice(comptime!(t.side * t.side));
    let mut d_weights = Shared::new_slice(comptime!(t.side * t.side));
    let mut weights = Shared::new_slice(comptime!(t.side * t.side));
    let mut d_scores = Shared::new_slice(comptime!(t.side * t.side));
    let mut row_lse = Shared::new_slice(comptime!(t.side));
    let mut row_delta = Shared::new_slice(comptime!(t.side));
    let mut out_k = Shared::new_slice(comptime!(t.side * t.head_dim));
    let mut out_v = Shared::new_slice(comptime!(t.side * t.head_dim));
    load::<E>(k, &mut k_tile, first, tokens, t.num_kv_heads, kv_head, t);
    load::<E>(v, &mut v_tile, first, tokens, t.num_kv_heads, kv_head, t);
    let sums_k = sums(&mut out_k, t);
    let sums_v = sums(&mut out_v, t);
    let mut last = first + t.side - 1;
    if last >= tokens {
        last = tokens - 1;
    }
    let mut end = last_query[last] as usize + 1;
    if end > last + window {
        end = last + window;
    }
    for member in 0..group {
        let head = kv_head * group + member;
        let mut query = first;
        while query < end {
            sync_cube();
            load::<E>(q, &mut q_tile, query, tokens, t.num_heads, head, t);
            load::<E>(d_o, &mut d_o_tile, query, tokens, t.num_heads, head, t);
            load_row(lse, &mut row_lse, query, tokens, head, t);
            load_row(delta, &mut row_delta, query, tokens, head, t);
            sync_cube();
            score::<E>(&q_tile, &k_tile, &mut scores, t);
            score::<E>(&d_o_tile, &v_tile, &mut d_weights, t);
            sync_cube();
            let mut e = UNIT_POS as usize;
            while e < t.side * t.side {
                let row = e / t.side;
                let mut weight = 0.0f32;
                if visible(query + row, first + e % t.side, first_key, tokens, window) {
                    weight = (scores[e] * scale - row_lse[row]).exp();
                }
                weights[e] = E::cast_from(weight);
                d_scores[e] = E::cast_from(weight * (d_weights[e] - row_delta[row]) * scale);
                e += t.units;
            }
            sync_cube();
            add_product::<E>(&weights, &d_o_tile, &sums_v, &mut out_v, true, t);
            add_product::<E>(&d_scores, &q_tile, &sums_k, &mut out_k, true, t);
            query += t.side;
        }
    }
    store::<E>(&sums_k, &mut out_k, dk, first, tokens, t.num_kv_heads, kv_head, t);
    store::<E>(&sums_v, &mut out_v, dv, first, tokens, t.num_kv_heads, kv_head, t);
}
