//! Which sequences go into the next step: prompts first, in chunks, then one token of every running sequence.
//!
//! Two queues and no model: the caller runs the step and reports back. (The shape is nano-vllm's.) When pages run out,
//! the youngest running job gives its pages back and is evaluated again later.

use crate::context::{Part, Rows};
use crate::error::{Error, Result};
use crate::kv::{Kv, Sequence};
use std::collections::VecDeque;

/// A request being worked on: its tokens so far and the sequence that holds the evaluated ones.
#[derive(Debug)]
pub struct Job {
    /// Names the job to the caller.
    pub id: u64,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    /// What of them is evaluated.
    pub seq: Sequence,
    /// Tokens of this step.
    chunk: usize,
}

impl Job {
    /// Tokens that are not evaluated yet.
    fn pending(&self) -> usize {
        self.tokens.len() - self.seq.len()
    }
}

/// The jobs of one engine.
#[derive(Debug)]
pub struct Scheduler {
    waiting: VecDeque<Job>,
    running: VecDeque<Job>,
    /// The jobs of the step that was last scheduled.
    step: Vec<Job>,
    max_seqs: usize,
    max_tokens: usize,
}

impl Scheduler {
    /// At most `max_seqs` sequences and `max_tokens` tokens a step.
    pub fn new(max_seqs: usize, max_tokens: usize) -> Scheduler {
        Scheduler { waiting: VecDeque::new(), running: VecDeque::new(), step: Vec::new(), max_seqs, max_tokens }
    }

    /// Queues a request. `seq` may hold a prefix of `tokens` already, but not all of them; all of them fit the context.
    pub fn add(&mut self, id: u64, tokens: Vec<u32>, seq: Sequence) {
        self.waiting.push_back(Job { id, tokens, seq, chunk: 0 });
    }

    /// Nothing waits or runs?
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.step.is_empty()
    }

    /// Chooses the next step and reserves its pages; false if there is nothing to do, or if no job fits the cache.
    pub fn schedule(&mut self, kv: &mut Kv) -> Result<bool> {
        // A step that was never finished (its evaluation failed) goes back to the queue.
        while let Some(job) = self.step.pop() {
            self.waiting.push_front(job);
        }
        self.prefill(kv)?;
        if self.step.is_empty() {
            self.decode(kv)?;
        }
        Ok(!self.step.is_empty())
    }

    /// Prompts in the order they came, the last one perhaps in part.
    fn prefill(&mut self, kv: &mut Kv) -> Result<()> {
        let mut budget = self.max_tokens;
        while self.step.len() + self.running.len() < self.max_seqs && budget > 0 {
            let Some(mut job) = self.waiting.pop_front() else { break };
            job.chunk = job.pending().min(budget);
            let alone = self.step.is_empty() && self.running.is_empty();
            match self.make_room(&mut job, alone, kv) {
                Ok(true) => {
                    budget -= job.chunk;
                    self.step.push(job);
                }
                full => {
                    self.waiting.push_front(job);
                    return full.map(|_| ());
                }
            }
        }
        Ok(())
    }

    /// One token of each running sequence, the oldest first.
    fn decode(&mut self, kv: &mut Kv) -> Result<()> {
        while self.step.len() < self.max_tokens {
            let Some(mut job) = self.running.pop_front() else { break };
            job.chunk = 1;
            match self.make_room(&mut job, true, kv) {
                Ok(true) => self.step.push(job),
                full => {
                    self.waiting.push_front(job);
                    return full.map(|_| ());
                }
            }
        }
        Ok(())
    }

    /// Reserves the pages of a job's chunk, if need be by taking those of others.
    fn make_room(&mut self, job: &mut Job, evict: bool, kv: &mut Kv) -> Result<bool> {
        loop {
            match job.seq.reserve(kv, job.chunk) {
                Err(Error::CacheFull { .. }) if evict && self.evict(kv)? => {}
                Err(Error::CacheFull { .. }) => return Ok(false),
                reserved => return reserved.map(|()| true),
            }
        }
    }

    /// Makes the youngest running job start over, or else the last waiting one that holds pages.
    fn evict(&mut self, kv: &mut Kv) -> Result<bool> {
        if let Some(mut job) = self.running.pop_back() {
            job.seq.truncate(0, kv)?;
            self.waiting.push_front(job);
            return Ok(true);
        }
        match self.waiting.iter_mut().rev().find(|j| j.seq.holds_pages()) {
            Some(job) => job.seq.truncate(0, kv).map(|()| true),
            None => Ok(false),
        }
    }

    /// The step for [`crate::context::Context::step`]: a row of logits for each job whose last token is in it.
    pub fn parts(&mut self) -> Vec<Part<'_>> {
        let parts = self.step.iter_mut().map(|job| {
            let at = job.seq.len();
            let rows = if job.chunk == job.tokens.len() - at { Rows::Last } else { Rows::None };
            Part { seq: &mut job.seq, tokens: &job.tokens[at..at + job.chunk], rows }
        });
        parts.collect()
    }

    /// The job of a part.
    pub fn job(&self, part: usize) -> Option<&Job> {
        self.step.get(part)
    }

    /// Takes back the step: `next(job)` gives the next token of each job that had a row of logits, or `None` if the job
    /// is done. Returns the jobs that are.
    pub fn finish(&mut self, mut next: impl FnMut(&Job) -> Option<u32>) -> Vec<Job> {
        let mut done = Vec::new();
        for mut job in std::mem::take(&mut self.step) {
            if job.pending() > 0 {
                // The rest of a long prompt is first in line.
                self.waiting.push_front(job);
                continue;
            }
            match next(&job) {
                Some(token) => {
                    job.tokens.push(token);
                    self.running.push_back(job);
                }
                None => done.push(job),
            }
        }
        done
    }
}
