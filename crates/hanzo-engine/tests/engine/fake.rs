//! A backend without arithmetic: its cache holds token ids, and the next token is a hash of those that attention would
//! see. Whatever pages, windows, forks, chunks or batches do wrong changes the hash.

use crate::tiny;
use hanzo_engine::model::{Model, ModelOptions};
use hanzo_gguf::Gguf;
use hanzo_ml::backend::{Backend, Cache, CompileOptions, Executable, OpTime, WeightSource, Weights};
use hanzo_ml::batch::{Batch, Input};
use hanzo_ml::cache::PAGE;
use hanzo_ml::error::Result;
use hanzo_ml::plan::{Plan, Sizes, ValueId};
use std::any::Any;
use std::sync::Arc;

pub struct FakeBackend;

struct FakeWeights;

struct FakeCache {
    groups: Vec<Vec<[u32; PAGE]>>,
    pages: Vec<usize>,
}

struct FakeExecutable {
    plan: Plan,
    bucket: Sizes,
}

/// The token that follows `tokens` where layers see the given windows: a byte, or sometimes the end.
pub fn follower(tokens: &[u32], windows: &[Option<u32>]) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for window in windows {
        let from = window.map_or(0, |w| tokens.len().saturating_sub(w as usize));
        for t in &tokens[from..] {
            hash = (hash ^ *t as u64).wrapping_mul(0x100_0000_01b3);
        }
    }
    let hash = (hash >> 17) as u32;
    // Printable, and the end about once in 64.
    if hash % 64 == 0 { tiny::EOS } else { tiny::BYTES + 32 + hash % 95 }
}

/// What a model on this backend would generate: at most `n` tokens, the end included.
pub fn continuation(prompt: &[u32], windows: &[Option<u32>], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(follower(&tokens, windows));
        if tokens.last() == Some(&tiny::EOS) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

pub fn model(arch: &str, options: ModelOptions) -> Arc<Model> {
    let gguf: Gguf = tiny::model(arch, 3, 1);
    Arc::new(Model::from_gguf(gguf, Arc::new(FakeBackend), options).expect("loads"))
}

pub fn windows(model: &Model) -> Vec<Option<u32>> {
    model.plan().groups.iter().map(|g| g.window).collect()
}

impl Weights for FakeWeights {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn extra_bytes(&self) -> usize {
        0
    }
}

impl Backend for FakeBackend {
    fn name(&self) -> &str {
        "fake"
    }
    fn load(&self, _: &Plan, _: &dyn WeightSource) -> Result<Arc<dyn Weights>> {
        Ok(Arc::new(FakeWeights))
    }
    fn alloc(&self, _: &Plan, pages: &[usize], _: &[usize]) -> Result<Box<dyn Cache>> {
        let groups = pages.iter().map(|n| vec![[u32::MAX; PAGE]; *n]).collect();
        Ok(Box::new(FakeCache { groups, pages: pages.to_vec() }))
    }
    fn compile(&self, plan: &Plan, o: &CompileOptions, _: &Arc<dyn Weights>) -> Result<Box<dyn Executable>> {
        Ok(Box::new(FakeExecutable { plan: plan.clone(), bucket: o.bucket }))
    }
}

impl Cache for FakeCache {
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
    fn pages(&self) -> &[usize] {
        &self.pages
    }
    fn slots(&self) -> &[usize] {
        &[]
    }
    fn copy_page(&mut self, group: usize, from: u32, to: u32) -> Result<()> {
        self.groups[group][to as usize] = self.groups[group][from as usize];
        Ok(())
    }
    fn copy_slot(&mut self, _: usize, _: u32, _: u32) -> Result<()> {
        Ok(())
    }
    fn clear_slot(&mut self, _: usize, _: u32) -> Result<()> {
        Ok(())
    }
    fn read_page(&self, _: usize, _: u32) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn write_page(&mut self, _: usize, _: u32, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn bytes(&self) -> usize {
        0
    }
}

impl Executable for FakeExecutable {
    fn plan(&self) -> &Plan {
        &self.plan
    }
    fn barriers(&self) -> usize {
        0
    }
    fn arena_bytes(&self) -> usize {
        0
    }
    fn value_mut(&mut self, _: ValueId) -> Result<&mut [f32]> {
        Ok(&mut [])
    }
    fn value(&self, _: ValueId) -> Result<&[f32]> {
        Ok(&[])
    }
    fn run(&mut self, batch: &Batch<'_>, cache: &mut dyn Cache, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let s = batch.sizes();
        assert!(s.n_tokens <= self.bucket.n_tokens && s.n_seqs <= self.bucket.n_seqs, "{s:?} in {:?}", self.bucket);
        let Input::Tokens(tokens) = batch.input else { panic!("tokens only") };
        let cache = cache.as_any_mut().downcast_mut::<FakeCache>().expect("a FakeCache");
        let windows: Vec<_> = self.plan.groups.iter().map(|g| g.window).collect();
        let slot = |g: usize, seq: usize, p: usize| {
            let t = &batch.groups[g];
            let pages = &t.pages[t.offsets[seq] as usize..t.offsets[seq + 1] as usize];
            (pages[p / PAGE - t.first[seq] as usize] as usize, p % PAGE)
        };
        let seq_of = |row: usize| batch.seq_offsets.partition_point(|o| *o as usize <= row) - 1;
        for (row, token) in tokens.iter().enumerate() {
            for g in 0..windows.len() {
                let (page, at) = slot(g, seq_of(row), batch.positions[row] as usize);
                assert!(page != 0, "a token goes to the padding page");
                cache.groups[g][page][at] = *token;
            }
        }
        let mut rows = Vec::new();
        for row in batch.out_rows {
            let (row, p) = (*row as usize, batch.positions[*row as usize] as usize);
            // Windowed layers see the window's tokens; what is before it may be gone.
            let mut hash = 0xcbf2_9ce4_8422_2325u64;
            for (g, window) in windows.iter().enumerate() {
                for q in window.map_or(0, |w| (p + 1).saturating_sub(w as usize))..=p {
                    let (page, at) = slot(g, seq_of(row), q);
                    hash = (hash ^ cache.groups[g][page][at] as u64).wrapping_mul(0x100_0000_01b3);
                }
            }
            let hash = (hash >> 17) as u32;
            let next = if hash % 64 == 0 { tiny::EOS } else { tiny::BYTES + 32 + hash % 95 };
            let mut logits = vec![0.0; tiny::VOCAB];
            logits[next as usize] = 10.0;
            rows.push(logits);
        }
        for (i, chunk) in rows.chunks(self.bucket.n_out).enumerate() {
            sink(i * self.bucket.n_out, &chunk.concat());
        }
        Ok(())
    }
    fn profile(&self) -> Vec<OpTime> {
        Vec::new()
    }
    fn set_profile(&mut self, _: bool) {}
}
