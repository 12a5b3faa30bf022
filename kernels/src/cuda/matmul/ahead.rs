//! Plans made before they are needed: of the products that the largest steps made, for all smaller
//! numbers of rows. The library loads an algorithm's code when it first runs, into memory that the
//! KV cache would have taken later, and a request does not wait for the measuring.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{ALIGNMENT_MOST, Matmul, PLANS_MAX, Product};
use crate::cuda::bucket::product_bucket;
use crate::cuda::memory::DeviceMemory;
use crate::cuda::stream::Stream;
use crate::error::KernelError;

/// Both bytes of a small bf16: what is measured are numbers.
const FILLED: u8 = 0x3c;

/// The numbers of rows that plans are made for, the largest first, from those above `above` to
/// `most`.
fn buckets(above: u32, most: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut rows = above + 1;
    while rows <= most {
        found.push(product_bucket(rows).min(most));
        rows = product_bucket(rows) + 1;
    }
    found.reverse();
    found
}

impl Matmul {
    /// Makes the plans that are missing, of more rows than `above`, for at most `limit`: returns
    /// how many. None where there is no memory for operands: what is missing is then made when it
    /// is needed.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(in crate::cuda) fn plan_ahead(
        &mut self,
        stream: &Stream,
        above: u32,
        limit: Duration,
    ) -> Result<usize, KernelError> {
        if limit.is_zero() {
            return Ok(0);
        }
        let began = Instant::now();
        let mut known: HashMap<(Product, u32), u32> = HashMap::new();
        for key in self.plans.keys() {
            let most =
                known.entry((Product { rows: 0, ..key.product }, key.alignment)).or_default();
            *most = key.product.rows.max(*most);
        }
        // In one order, whatever the map's.
        let mut known: Vec<_> = known.into_iter().collect();
        known.sort_by_key(|((product, alignment), _)| (product.n, product.k, *alignment));
        let slack = ALIGNMENT_MOST as usize;
        let largest = |bytes: &dyn Fn(&Product, usize) -> usize| {
            let of = |((product, _), rows): &((Product, u32), u32)| bytes(product, *rows as usize);
            known.iter().map(of).max().unwrap_or(0) + 2 * slack
        };
        let sizes = [
            largest(&|product, rows| rows * product.x_stride as usize * 2),
            largest(&|product, _| product.n as usize * product.w_stride as usize * 2),
            largest(&|product, rows| rows * product.out_stride as usize * 4),
        ];
        let mut operands = Vec::new();
        for bytes in sizes {
            match DeviceMemory::new(&self.context, bytes, "products that are planned") {
                Ok(memory) => operands.push(memory),
                Err(KernelError::OutOfMemory { .. }) => return Ok(0),
                Err(error) => return Err(error),
            }
        }
        let [x, w, out] = operands.as_slice() else { return Ok(0) };
        for memory in [x, w, out] {
            memory.fill(stream, FILLED)?;
        }
        let before = self.plans.len();
        'all: for ((product, alignment), most) in known {
            // Exactly as aligned as the step's operands: the choice depends on it.
            let shift = alignment as usize % slack;
            let at = |memory: &DeviceMemory| memory.ptr().offset(shift);
            for rows in buckets(above, most) {
                // Room for plans is left to what steps need and this did not foresee.
                if began.elapsed() >= limit || self.plans.len() >= PLANS_MAX / 4 * 3 {
                    break 'all;
                }
                let product = Product { rows, ..product };
                let key = product.key([at(x), at(w), at(out)]);
                if self.plans.contains_key(&key) {
                    continue;
                }
                // SAFETY: each operand has room for the largest of all products and the shift.
                let planned = unsafe { self.run(stream, &product, at(x), at(w), at(out)) }?;
                stream.synchronize()?;
                if !planned {
                    // Perhaps for lack of the memory that these operands take.
                    self.plans.remove(&key);
                }
            }
        }
        stream.synchronize()?;
        Ok(self.plans.len() - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_rows_has_a_bucket_that_is_planned() {
        for (above, most) in [(32, 33), (32, 40), (32, 512), (32, 2048), (32, 5000), (256, 1024)] {
            let found = buckets(above, most);
            assert!(found.is_sorted_by(|a, b| a > b), "{found:?}");
            let planned: Vec<u32> = found.iter().map(|rows| product_bucket(*rows)).collect();
            for rows in above + 1..=most {
                assert!(planned.contains(&product_bucket(rows)), "{rows} of {most}: {found:?}");
            }
            assert!(found.iter().all(|rows| *rows <= most));
        }
        assert_eq!(buckets(32, 32), []);
    }
}
