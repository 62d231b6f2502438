//! Sequences behave like plain lists of tokens, whatever is forked, cut, restored and dropped.

use super::*;
use hanzo_gguf::Format;
use std::any::Any;

/// A cache whose pages hold the token written at each place.
struct TokenCache {
    pages: Vec<usize>,
    slots: Vec<usize>,
    rows: Vec<Vec<[u32; PAGE]>>,
    states: Vec<Vec<u64>>,
}

type MlResult<T> = hanzo_ml::error::Result<T>;

impl Cache for TokenCache {
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
    fn pages(&self) -> &[usize] {
        &self.pages
    }
    fn slots(&self) -> &[usize] {
        &self.slots
    }
    fn copy_page(&mut self, group: usize, from: u32, to: u32) -> MlResult<()> {
        self.rows[group][to as usize] = self.rows[group][from as usize];
        Ok(())
    }
    fn copy_slot(&mut self, state: usize, from: u32, to: u32) -> MlResult<()> {
        self.states[state][to as usize] = self.states[state][from as usize];
        Ok(())
    }
    fn clear_slot(&mut self, state: usize, slot: u32) -> MlResult<()> {
        self.states[state][slot as usize] = 0;
        Ok(())
    }
    fn read_page(&self, _: usize, _: u32) -> MlResult<Vec<u8>> {
        Ok(Vec::new())
    }
    fn write_page(&mut self, _: usize, _: u32, _: &[u8]) -> MlResult<()> {
        Ok(())
    }
    fn bytes(&self) -> usize {
        0
    }
}

fn group(window: Option<u32>) -> CacheGroup {
    let (type_k, type_v) = (Format::F16, Format::F16);
    CacheGroup { name: "kv".into(), layers: 1, n_kv: 1, d_k: 32, d_v: 32, type_k, type_v, window }
}

fn kv(windows: &[Option<u32>], pages: usize, states: usize, n_ctx: usize) -> Kv {
    let cache = TokenCache {
        pages: vec![pages; windows.len()],
        slots: vec![8; states],
        rows: vec![vec![[NO_TOKEN; PAGE]; pages]; windows.len()],
        states: vec![vec![0; 8]; states],
    };
    Kv::over(Box::new(cache), windows.iter().map(|w| group(*w)).collect(), n_ctx)
}

fn cache(kv: &mut Kv) -> &mut TokenCache {
    kv.cache().as_any_mut().downcast_mut().expect("a TokenCache")
}

/// What a recurrent state would be after `token`.
fn advance(state: u64, token: u32) -> u64 {
    (state ^ token as u64).wrapping_mul(0x100_0000_01b3).rotate_left(17)
}

/// What a backend does in a step.
fn append(kv: &mut Kv, seq: &mut Sequence, tokens: &[u32]) -> Result<()> {
    seq.reserve(kv, tokens.len())?;
    for g in 0..kv.groups.len() {
        let (first, pages) = (seq.tables[g].first, seq.tables[g].pages.clone());
        for (i, t) in tokens.iter().enumerate() {
            let p = seq.len() + i;
            cache(kv).rows[g][pages[p / PAGE - first] as usize][p % PAGE] = *t;
        }
    }
    for (s, slot) in seq.slots.clone().into_iter().enumerate() {
        let state = &mut cache(kv).states[s][slot as usize];
        *state = tokens.iter().fold(*state, |a, t| advance(a, *t));
    }
    seq.commit(tokens);
    Ok(())
}

/// Everything that the next query sees is what the list says.
fn agrees(kv: &mut Kv, seq: &Sequence, list: &[u32]) {
    assert_eq!(seq.tokens(), list);
    for g in 0..kv.groups.len() {
        let (first, pages) = seq.pages(g);
        let from = kv.window(g).map_or(0, |w| (list.len() + 1).saturating_sub(w as usize));
        for (p, token) in list.iter().enumerate().skip(from) {
            let page = pages[p / PAGE - first];
            assert!(page != 0, "the padding page is owned");
            assert_eq!(cache(kv).rows[g][page as usize][p % PAGE], *token, "group {g}, position {p}");
        }
    }
    for (s, slot) in seq.slots.iter().enumerate() {
        assert_eq!(cache(kv).states[s][*slot as usize], list.iter().fold(0, |a, t| advance(a, *t)));
    }
}

/// xorshift64 (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

#[test]
fn any_sequence_of_operations_leaves_sequences_equal_to_plain_lists() {
    for (seed, states) in (1..=12).zip([0, 1].into_iter().cycle()) {
        let mut r = Random(seed * 0x9e37_79b9);
        let mut kv = kv(&[None, Some(70), Some(1)], 40, states, 500);
        // A sequence, its list, and its length before the last append: what the windows were freed for.
        let mut seqs: Vec<(Sequence, Vec<u32>, usize)> = Vec::new();
        let (mut refused, mut done) = (0, 0);
        for step in 0..3000u32 {
            if seqs.is_empty() || (seqs.len() < 5 && r.below(20) == 0) {
                seqs.push((kv.sequence().expect("a slot"), Vec::new(), 0));
            }
            let i = r.below(seqs.len());
            let ok = match r.below(10) {
                0..=4 => {
                    let most = if r.below(4) == 0 { 90 } else { 3 };
                    let n = 1 + r.below(most);
                    let tokens: Vec<u32> = (0..n as u32).map(|t| step * 100 + t).collect();
                    let (seq, list, freed_for) = &mut seqs[i];
                    // A refused append has freed what it could, too.
                    *freed_for = list.len().max(*freed_for);
                    let ok = append(&mut kv, seq, &tokens).is_ok();
                    if ok {
                        list.extend(tokens);
                    }
                    ok
                }
                5 if seqs.len() < 7 => {
                    let (list, freed_for) = (seqs[i].1.clone(), seqs[i].2);
                    seqs[i].0.fork(&mut kv).map(|s| seqs.push((s, list, freed_for))).is_ok()
                }
                6 | 7 => {
                    let (seq, list, freed_for) = &mut seqs[i];
                    let back = if r.below(3) == 0 { r.below(list.len() + 1) } else { r.below(SLACK).min(list.len()) };
                    let len = list.len() - back;
                    let ok = seq.truncate(len, &mut kv).is_ok();
                    if ok {
                        list.truncate(len);
                    }
                    // Small steps back are always possible without states.
                    assert!(ok || states > 0 || len + SLACK < *freed_for, "back {back} to {len} from {freed_for}");
                    ok
                }
                8 if seqs.len() > 1 => {
                    let j = (i + 1) % seqs.len();
                    let other = seqs.swap_remove(j);
                    let i = i.min(seqs.len() - 1);
                    seqs[i].1.clone_from(&other.1);
                    seqs[i].2 = other.2;
                    let ok = seqs[i].0.restore(&other.0, &mut kv).is_ok();
                    seqs.push(other);
                    ok
                }
                _ => {
                    seqs.swap_remove(i);
                    true
                }
            };
            *if ok { &mut done } else { &mut refused } += 1;
            for (seq, list, _) in &seqs {
                agrees(&mut kv, seq, list);
            }
        }
        assert!(done > 10 * refused / 4 && refused > 0, "seed {seed}: {done} done, {refused} refused");
        drop(seqs);
        assert!(kv.is_unused(), "seed {seed} leaks");
    }
}

#[test]
fn forks_share_pages_until_one_writes() {
    let mut kv = kv(&[None], 10, 0, 200);
    let mut a = kv.sequence().expect("a slot");
    append(&mut kv, &mut a, &[7; 40]).expect("room");
    assert_eq!(kv.free_pages(), [7]);
    let mut b = a.fork(&mut kv).expect("a slot");
    assert_eq!(kv.free_pages(), [7]);
    append(&mut kv, &mut b, &[8]).expect("room");
    assert_eq!(kv.free_pages(), [6], "only the half-filled page was copied");
    assert_eq!(a.pages(0).1[0], b.pages(0).1[0]);
    assert_ne!(a.pages(0).1[1], b.pages(0).1[1]);
}

#[test]
fn a_full_cache_refuses_and_changes_nothing() {
    let mut kv = kv(&[None], 3, 0, 500);
    let mut a = kv.sequence().expect("a slot");
    append(&mut kv, &mut a, &[1; 64]).expect("room");
    let e = append(&mut kv, &mut a, &[2]).expect_err("no page is left");
    assert!(matches!(e, Error::CacheFull { needed: 1, free: 0, .. }), "{e}");
    agrees(&mut kv, &a, &[1; 64]);
    a.truncate(10, &mut kv).expect("no window");
    append(&mut kv, &mut a, &[3; 54]).expect("pages came back");
}

#[test]
fn a_window_frees_pages_and_holds_no_more_than_its_size_asks_for() {
    let size = KvSize { n_ctx: 4000, n_seqs: 1, n_ubatch: 64 };
    let pages = size.pages(&group(Some(100)));
    let mut kv = kv(&[Some(100)], pages, 0, 4000);
    let mut a = kv.sequence().expect("a slot");
    let mut r = Random(5);
    while a.len() < 3900 {
        let n = 1 + r.below(64);
        append(&mut kv, &mut a, &vec![1; n]).expect("the computed number of pages is enough");
    }
    assert!(a.truncate(1000, &mut kv).is_err(), "that window is gone");
    a.truncate(0, &mut kv).expect("starting over is always possible");
    append(&mut kv, &mut a, &[2; 50]).expect("room");
    agrees(&mut kv, &a, &[2; 50]);
}
