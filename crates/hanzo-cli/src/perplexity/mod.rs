//! How well a model predicts a text: the chunks of the field's convention, and a base of log-probabilities to compare with.
//!
//! The text's tokens are cut into chunks of the context's length; in each, the second half is predicted, so that every
//! token that counts has seen at least half a context. [`base`] is the file, [`divergence`] the comparison.

pub mod base;
pub mod divergence;

/// Which tokens are evaluated and which count.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunks {
    /// Tokens of a chunk.
    pub n_ctx: usize,
    /// The chunks one after the other, each opened by BOS where the model wants it.
    pub ids: Vec<u32>,
}

impl Chunks {
    /// Cuts a text's tokens into whole chunks, at most `limit`; what is left over does not count.
    pub fn cut(mut ids: Vec<u32>, n_ctx: usize, bos: Option<u32>, limit: Option<usize>) -> Chunks {
        let n = (ids.len() / n_ctx).min(limit.unwrap_or(usize::MAX));
        ids.truncate(n * n_ctx);
        if let Some(bos) = bos {
            ids.chunks_exact_mut(n_ctx).for_each(|chunk| chunk[0] = bos);
        }
        Chunks { n_ctx, ids }
    }

    /// The chunks.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.ids.chunks_exact(self.n_ctx)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ids.len() / self.n_ctx
    }

    /// The first position of a chunk whose next token is predicted; the last such is the last but one.
    pub fn first(&self) -> usize {
        self.n_ctx / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_chunks_open_with_bos_and_the_second_half_counts() {
        let chunks = Chunks::cut((0..23).collect(), 8, Some(99), None);
        assert_eq!((chunks.len(), chunks.first()), (2, 4));
        let all: Vec<&[u32]> = chunks.iter().collect();
        assert_eq!(all, [[99, 1, 2, 3, 4, 5, 6, 7], [99, 9, 10, 11, 12, 13, 14, 15]]);
        let one = Chunks::cut((0..23).collect(), 8, None, Some(1));
        assert_eq!(one.ids, (0..8).collect::<Vec<_>>());
        assert_eq!(Chunks::cut(vec![1, 2], 8, None, None).len(), 0);
    }
}
