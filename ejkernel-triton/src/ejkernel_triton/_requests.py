"""Device function that finds the request of a token or program."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl


@triton.jit
def count_up_to(p_ascending, length, index, BLOCK: tl.constexpr):
    """How many of the ascending values are at most `index`."""
    count = 0
    for i_start in range(0, length, BLOCK):
        o_value = i_start + tl.arange(0, BLOCK)
        b_value = tl.load(p_ascending + o_value, mask=o_value < length, other=2147483647)  # [BLOCK]
        count += tl.sum((b_value <= index).to(tl.int32))
    return count
