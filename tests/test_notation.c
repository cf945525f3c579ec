/* test_notation.c - the notation: what is parsed, what is printed, and what errors say. */
#include "oracle.h"
#include "plans.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>

static void canonical_forms(void)
{
    static const char *const forms[][2] = {
        {"f32[4096,4096] @ dp=2,tp=4 : S(0),S(1)", "f32[4096,4096] @ dp=2,tp=4 : S(0),S(1)"},
        {"f32[4096,4096]@2x4:S0,R", "f32[4096,4096] @ 2x4 : S(0),R"},
        {" f32 [ 4096 , 4096 ] @ dp = 2 x tp=4 : [ tp . dp , - ] ",
         "f32[4096,4096] @ dp=2,tp=4 : [tp.dp, -]"},
        {"f32[8,8] @ dp=2,tp=4 : [dp.tp, -]", "f32[8,8] @ dp=2,tp=4 : S(0),S(0)"},
        {"f32[8,8] @ 2x4 : [-, 1]", "f32[8,8] @ 2x4 : R,S(1)"},
        {"f32[8,8] @ dp=2,tp=4 : Replicate()", "f32[8,8] @ dp=2,tp=4 : R,R"},
        {"f32[8,8] @ 2x4 : [1.0, -]", "f32[8,8] @ 2x4 : [1.0, -]"},
        {"f32[16,1] @ { 0:4 | 4:7 | 7:11 | 11:16 }", "f32[16,1] @ { 0:4 | 4:7 | 7:11 | 11:16 }"},
        {"f32[16,1]@{0:4,0:1;8:9|  |:,:}", "f32[16,1] @ { 0:4; 8:9 | | : }"},
        {"i8[4,6] @ { :,2:4 | }", "i8[4,6] @ { :,2:4 }"},
        {"i8[4,6] @ { }", "i8[4,6] @ { }"},
        {"f32[16] @ { 20:20 | 3:3 }", "f32[16] @ { 16:16 | 3:3 }"},
        {"f32[] @ 4:R", "f32[] @ 4 : R"},
        {"f32[] @ { : | | : }", "f32[] @ { : | | : }"},
        {"bf16[9,9] @ 3 : S(-1)", "bf16[9,9] @ 3 : S(1)"},
        {"bf16[9,9] @ 3 : S-2", "bf16[9,9] @ 3 : S(0)"},
        {"f64[9] @ 3 : B0", "f64[9] @ 3 : B(0)"},
        {"f64[9] @ 3 : P", "f64[9] @ 3 : P(sum)"},
        {"i64[9] @ 2x2 : P(bxor),P(bxor)", "i64[9] @ 2x2 : P(bxor),P(bxor)"},
        {"f64[9] @ 2x2 : P(sum),P(avg)", "f64[9] @ 2x2 : P(sum),P(avg)"},
        {"f64[9] @ 3x2 : _S(0,2),S(0)", "f64[9] @ 3x2 : _S(0,2),S(0)"},
        {"f64[9] @ 3 : C(0,4)", "f64[9] @ 3 : C(0,4)"},
        {"f64[16] @ 4 : S(0;8,4,4)", "f64[16] @ 4 : S(0;8,4,4)"},
        {"u8[9] @ 4 ranks=0-3 : S0", "u8[9] @ 4 : S(0)"},
        {"u8[9] @ 4 ranks=4-7 : S0", "u8[9] @ 4 ranks=4-7 : S(0)"},
        {"u8[9] @ 4 ranks=3,1,0,2 : S0", "u8[9] @ 4 ranks=3,1,0,2 : S(0)"},
        {"u8[9] @ 2x4 ranks=0,1,2-3,8-11 : S0,R", "u8[9] @ 2x4 ranks=0-3,8-11 : S(0),R"},
        {"u8[9] @ x=2,y=2 ranks=5,6,7,8 : S0,R", "u8[9] @ x=2,y=2 ranks=5-8 : S(0),R"},
        {"f8e4m3[2] @ 1:R", "f8e4m3[2] @ 1 : R"},
        {"c32[2,0,3] @ 5:S1", "c32[2,0,3] @ 5 : S(1)"},
        {"float32[8,8] @ 2x4 : Shard(0), Replicate()", "f32[8,8] @ 2x4 : S(0),R"},
        {"torch.bfloat16[8,8] @ 2x4 : [Shard(dim=0), Shard(-1)]", "bf16[8,8] @ 2x4 : S(0),S(1)"},
        {"np.int64[9] @ 2x2 : (Partial(), Partial(reduce_op='avg'))",
         "i64[9] @ 2x2 : P(sum),P(avg)"},
        {"f64[9] @ 2x2 : Partial(\"sum\"),P( \"mean\" )", "f64[9] @ 2x2 : P(sum),P(avg)"},
        {"f64[9] @ 2 : Partial(prod)", "f64[9] @ 2 : P(product)"},
        {"f64[9] @ 3x2 : _StridedShard(dim=0, split_factor=2),Shard(0)",
         "f64[9] @ 3x2 : _S(0,2),S(0)"},
        {"f64[9] @ 3x2 : [_StridedShard(dim=0, sf=2), Shard(dim=0)]",
         "f64[9] @ 3x2 : _S(0,2),S(0)"},
        {"f64[9] @ 3 : Cyclic(0, block=4)", "f64[9] @ 3 : C(0,4)"},
        {"f64[9] @ 3 : Balanced(0)", "f64[9] @ 3 : B(0)"},
        {"f64[9,9] @ 2x2x2 : colwise,RowWise,replicate", "f64[9,9] @ 2x2x2 : S(0),S(1),R"},
        {"f32[8,8] @ Shard=2,R=4 : [Shard.R, -]", "f32[8,8] @ Shard=2,R=4 : S(0),S(0)"},
    };
    CASE("the notation prints one canonical form, which parses to the same layout");
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        rsd_layout *layout = parsed(forms[i][0]), *again = parsed(forms[i][1]);
        if (!layout || !again)
            continue;
        prints_as(layout, forms[i][1]);
        CHECK(rsd_layout_equal(layout, again), "%s", forms[i][0]);
        rsd_layout_free(layout);
        rsd_layout_free(again);
    }
    CASE("every dtype has a name that is parsed to it");
    for (int dtype = RSD_F64; dtype <= RSD_C32; dtype++) {
        rsd_dtype again;
        OK(rsd_dtype_parse(rsd_dtype_name((rsd_dtype)dtype), &again));
        CHECK((int)again == dtype && rsd_dtype_nbytes(again) > 0);
    }
    static const char *const words[][2] = {{"float8_e4m3fn", "f8e4m3"},
                                           {"torch.uint8", "u8"},
                                           {"numpy.complex64", "c64"},
                                           {"np.bool", "bool"},
                                           {"float4_e2m1fn_x2", "f4x2"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        rsd_dtype dtype = 0;
        OK(rsd_dtype_parse(words[i][0], &dtype));
        CHECK(strcmp(rsd_dtype_name(dtype), words[i][1]) == 0, "%s", words[i][0]);
    }
    CHECK(!rsd_dtype_name((rsd_dtype)0) && rsd_dtype_nbytes((rsd_dtype)99) == 0);
}

static void syntax_errors(void)
{
    static const struct {
        const char *text, *message;
        rsd_status status;
    } wrong[] = {
        {"", "column 1: expected a dtype, found the end", RSD_EINVAL},
        {"f31[4] @ 2:S0", "column 1: unknown dtype 'f31'; did you mean 'f32'?", RSD_EINVAL},
        {"flaot32[4] @ 2:S0", "unknown dtype 'flaot32'; did you mean 'float32'?", RSD_EINVAL},
        {"torch.f32[4] @ 2:S0", "unknown dtype 'torch.f32'; use one of f64, f32, f16", RSD_EINVAL},
        {"torch.[4] @ 2:S0", "column 7: expected a dtype, found '['", RSD_EINVAL},
        {"f32[4] : 2:S0", "column 8: expected '@' between the tensor and its layout (':' is for",
         RSD_EINVAL},
        {"f32 4] @ 2:S0", "column 5: expected '[', found '4'", RSD_EINVAL},
        {"f32[4 @ 2:S0", "column 7: expected ',' or ']', found '@'", RSD_EINVAL},
        {"f32[4,] @ 2:S0", "column 7: expected an extent, found ']'", RSD_EINVAL},
        {"f32[-4] @ 2:S0", "column 5: expected an extent", RSD_EINVAL},
        {"f32[4] 2:S0", "column 8: expected '@'", RSD_EINVAL},
        {"f32[4] @ :S0", "column 10: expected a mesh axis", RSD_EINVAL},
        {"f32[4] @ dp2:S0", "column 13: expected '=' after the name of a mesh axis", RSD_EINVAL},
        {"f32[4] @ 2x:S0", "column 12: expected a mesh axis", RSD_EINVAL},
        {"f32[4] @ 0:S0", "column 10: mesh axis 0 has 0 ranks", RSD_EINVAL},
        {"f32[4] @ ranks=2:S0", "invalid name of a mesh axis 'ranks'", RSD_EINVAL},
        {"f32[4] @ tp=2,tp=2:S0,R", "column 10: two mesh axes have the name 'tp'", RSD_EINVAL},
        {"f32[4] @ 2 S0", "column 12: expected ':' between the mesh and its placements",
         RSD_EINVAL},
        {"f32[4] @ 2:", "column 12: expected a placement", RSD_EINVAL},
        {"f32[4] @ 2:X0", "column 12: unknown placement 'X'; use one of S, B, _S, C, R, P, Shard",
         RSD_EINVAL},
        {"f32[4] @ 2:Sharde(0)", "column 12: unknown placement 'Sharde'; did you mean 'Shard'?",
         RSD_EINVAL},
        {"f32[4] @ 2:rowwise", "column 12: dim 1 out of range: the tensor has 1 dims", RSD_EINVAL},
        {"f32[4] @ 2:Replicate(0)", "column 22: expected ')', found '0'", RSD_EINVAL},
        {"f32[4] @ 2:[Shard(0)", "column 21: expected ',' or ']', found the end", RSD_EINVAL},
        {"f32[4] @ 2:(R]", "column 14: expected ',' or ')', found ']'", RSD_EINVAL},
        {"f32[4] @ 2:P(\"sum)", "column 18: expected the closing quote, found ')'", RSD_EINVAL},
        {"f32[4] @ 2:S(split=0)", "column 14: expected a dim, found 's'", RSD_EINVAL},
        {"f32[4] @ 2:S1", "column 13: dim 1 out of range: the tensor has 1 dims", RSD_EINVAL},
        {"f32[4] @ 2:S(-2)", "column 14: dim -2 out of range: the tensor has 1 dims", RSD_EINVAL},
        {"f32[] @ 2:S0", "column 12: dim 0 out of range: the tensor has 0 dims", RSD_EINVAL},
        {"f32[4] @ 2:S(0", "column 15: expected ')', found the end", RSD_EINVAL},
        {"f32[4] @ 2:S0,R", "column 15: more placements than mesh axes (1)", RSD_EINVAL},
        {"f32[4] @ 2x2:S0", "column 16: 1 placement, but the mesh has 2 axes", RSD_EINVAL},
        {"f32[4] @ 2:S(0;1,2)", "column 12: segments add up to 3, but dim 0 has extent 4",
         RSD_EINVAL},
        {"f32[4] @ 2:S(0;3,2)",
         "segment 1 has length 2, which exceeds the rest of dim 0 (extent 4)", RSD_EINVAL},
        {"f32[4] @ 2:B(0;4)", "column 15: expected ')', found ';'", RSD_EINVAL},
        {"f32[4] @ 2:_S(0,0)", "column 17: split factor is 0, but must be at least 1", RSD_EINVAL},
        {"f32[4] @ 2:C(0)", "column 15: expected ','", RSD_EINVAL},
        {"f32[4] @ 2:P(median)",
         "column 14: unknown reduction 'median'; use one of sum, avg, min, max, product",
         RSD_EINVAL},
        {"f32[4] @ 2:P(prodct)", "did you mean 'product'?", RSD_EINVAL},
        {"f32[4] @ 2:P(mena)", "did you mean 'mean'?", RSD_EINVAL},
        {"f32[4] @ 2x2:P(min),P(max)",
         "column 14: mesh axis 1 is P(max), but an axis before it is P(min)", RSD_EINVAL},
        {"f32[4] @ 2 ranks=0,0:S0", "column 10: mesh has rank 0 twice", RSD_EINVAL},
        {"f32[4] @ 2 ranks=0:S0", "the mesh has 2 positions, but ranks= lists 1", RSD_EINVAL},
        {"f32[4] @ 2 ranks=3-2:S0", "column 19: invalid range of ranks 3-2", RSD_EINVAL},
        {"f32[4] @ 2 ranks=:S0", "column 18: expected a rank", RSD_EINVAL},
        {"f32[4] @ 2:[2]", "column 13: axis 2 out of range: the mesh has 1 axes", RSD_EINVAL},
        {"f32[4] @ 2:[tp]", "column 13: unknown mesh axis 'tp'", RSD_EINVAL},
        {"f32[4] @ data=2:[date]", "unknown mesh axis 'date'; did you mean 'data'?", RSD_EINVAL},
        {"f32[4,4] @ 2:[0,0]", "column 17: a mesh axis is used twice", RSD_EINVAL},
        {"f32[4,4] @ 2x2:[0,0]", "column 17: mesh axis 0 is used twice", RSD_EINVAL},
        {"f32[4,4] @ 2:[0]", "the list has 1 dims, but the tensor has 2", RSD_EINVAL},
        {"f32[4] @ 2:[0,-]", "column 15: the list has more dims than the tensor (1)", RSD_EINVAL},
        {"f32[4] @ { 0:5 }", "column 12: range 0:5 exceeds the extent 4 of dim 0", RSD_EINVAL},
        {"f32[4] @ { 3:2 }", "column 12: invalid range 3:2", RSD_EINVAL},
        {"f32[4] @ { 0:2,0:1 }", "column 16: the box has more dims than the tensor (1)",
         RSD_EINVAL},
        {"f32[4] @ { 0:2", "column 15: expected ',', ';', '|' or '}', found the end", RSD_EINVAL},
        {"f32[] @ { 0:1 }", "column 11: expected ':'", RSD_EINVAL},
        {"f32[4] @ 2:S0 x", "column 15: expected the end, found 'x'", RSD_EINVAL},
        {"f32[99999999999999999999] @ 2:S0", "column 5: number exceeds 2^63 - 1", RSD_ELIMIT},
        {"f32[4] @ 99999999999:S0", "more than 2^31 - 1 ranks", RSD_ELIMIT},
        {"f32[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1] @ 2:S0", "more than 16 dims", RSD_ELIMIT},
    };
    CASE("errors have the column and the values");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rsd_layout *layout = NULL;
        rsd_status status = rsd_layout_parse(wrong[i].text, &layout);
        CHECK(status == wrong[i].status, "%s: %s", wrong[i].text, rsd_status_name(status));
        CHECK(strstr(rsd_error(), wrong[i].message) != NULL, "%s: '%s' should contain '%s'",
              wrong[i].text, rsd_error(), wrong[i].message);
        CHECK(layout == NULL, "output written on failure");
        rsd_layout_free(layout);
    }
    rsd_layout *a = NULL, *b = NULL;
    FAILS(RSD_EINVAL, "column 14: expected '->'", rsd_problem_parse("f32[4] : 2:S0", &a, &b));
    FAILS(RSD_EINVAL, "column 23: dim 1", rsd_problem_parse("f32[4] : 2:S0 -> 4:  S1", &a, &b));
    FAILS(RSD_EINVAL, "expected a rank", rsd_problem_parse("f32[4] : 2 ranks=0- -> 4:S0", &a, &b));
    FAILS(RSD_EINVAL, "'=' after the name",
          rsd_problem_parse("f32[4] : 2:S0 -> bf17 4:S0", &a, &b));
    CHECK(!a && !b);
}

static void random_texts(int count)
{
    struct random r = {7};
    CASE("%d random layouts print and parse back", count);
    for (int i = 0; i < count; i++) {
        char side[2048], text[2300], *printed;
        struct random_tensor t = random_tensor(&r, "f32");
        random_side(&r, &t, i % 5 == 0 ? "max" : NULL, side, sizeof side);
        snprintf(text, sizeof text, "%s @ %s", t.text, side);
        rsd_layout *layout = parsed(text), *again;
        if (!layout || !OK(rsd_layout_print(layout, &printed)))
            return;
        again = parsed(printed);
        CHECK(again && rsd_layout_equal(layout, again), "%s and %s", text, printed);
        prints_as(again, printed);
        rsd_free(printed);
        rsd_layout_free(layout);
        rsd_layout_free(again);
    }
}

int main(int argc, char **argv)
{
    canonical_forms();
    syntax_errors();
    random_texts(argc > 1 ? atoi(argv[1]) : 3000);
    return tap_end();
}
