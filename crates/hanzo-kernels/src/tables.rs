//! The formats' codebooks as the GPU sees them: u32 words of one device buffer. Only the grids of the IQ formats are
//! here; small tables are arithmetic in the format files.

use hanzo_gguf::formats::tables;

/// The words of a codebook by its name in a format file; empty for a name that is not known.
///
/// * `iq2_*_grid` (rows of 8 bytes): the first halves of all rows, then the second halves, so that each of a row's two
///   words is found from its number by one offset and random rows spread over all banks of shared memory.
/// * `iq3_*_grid` (rows of 4 bytes): a word a row.
/// * `iq1_s_grid` (rows of 8 ternary points): a word a row; element `j` (`j < 4`) is nibble `2 j`, element `4 + j` nibble
///   `2 j + 1`; a nibble's high two bits are `floor(point + 1/8)` and its low two `floor(point - 1/8)`, in two's complement.
pub fn codebook(name: &str) -> Vec<u32> {
    match name {
        "iq1_s_grid" => tables::IQ1_S_GRID.iter().map(|&row| ternary(row)).collect(),
        "iq2_xxs_grid" => halves(&tables::IQ2_XXS_GRID),
        "iq2_xs_grid" => halves(&tables::IQ2_XS_GRID),
        "iq2_s_grid" => halves(&tables::IQ2_S_GRID),
        "iq3_xxs_grid" => tables::IQ3_XXS_GRID.to_vec(),
        "iq3_s_grid" => tables::IQ3_S_GRID.to_vec(),
        _ => Vec::new(),
    }
}

/// The low words of all rows, then the high ones.
fn halves(rows: &[u64]) -> Vec<u32> {
    let low = rows.iter().map(|&row| row as u32);
    low.chain(rows.iter().map(|&row| (row >> 32) as u32)).collect()
}

/// Eight bytes of -1, 0 or 1 as nibbles, the elements 0 to 3 and 4 to 7 taking turns.
fn ternary(row: u64) -> u32 {
    let nibbles = row.to_le_bytes().map(|point| u32::from(point & 3) << 2 | u32::from(point.wrapping_sub(1) & 3));
    (0..4).fold(0, |word, j| word | nibbles[j] << (8 * j) | nibbles[4 + j] << (8 * j + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_row_is_found_from_its_number() {
        let grid = codebook("iq2_s_grid");
        assert_eq!(grid.len(), 2048);
        for (i, row) in tables::IQ2_S_GRID.iter().enumerate() {
            assert_eq!(u64::from(grid[i]) | u64::from(grid[1024 + i]) << 32, *row);
        }
    }

    #[test]
    fn a_ternary_row_comes_back_from_its_nibbles() {
        let grid = codebook("iq1_s_grid");
        assert_eq!(grid.len(), 2048);
        for (word, row) in grid.iter().zip(tables::IQ1_S_GRID) {
            for (j, point) in row.to_le_bytes().into_iter().enumerate() {
                let nibble = word >> (8 * (j % 4) + j / 4 * 4) & 15;
                // As the tops of signed nibbles.
                let up = ((nibble & 12) << 4) as u8 as i8 >> 6;
                let down = ((nibble & 3) << 6) as u8 as i8 >> 6;
                assert_eq!((up, down), (point as i8, point as i8 - 1));
            }
        }
    }

    #[test]
    fn an_unknown_codebook_is_empty() {
        assert!(codebook("no_such_grid").is_empty());
    }
}
