/* explain.c - a description of a plan, as text or as JSON. */
#include "plan.h"

#include <stdlib.h>

static void add_size(struct text *text, int64_t nbytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)nbytes;
    int unit = 0;
    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    text_add(text, unit ? "%.3g %s" : "%.0f %s", value, units[unit]);
}

/* ---- pairs of ranks ---- */

/* Writes the pairs of one receiver, and clears the list. */
static void write_pairs(struct text *text, struct rank_list *senders, int32_t to, bool json,
                        bool *any)
{
    rank_list_merge(senders);
    for (size_t i = 0; i < senders->n; i++) {
        const struct rank_nbytes *sender = &senders->list[i];
        if (json)
            text_add(text, "%s{\"from\": %d, \"to\": %d, \"bytes\": %lld}", *any ? ", " : "",
                     (int)sender->rank, (int)to, (long long)sender->nbytes);
        else
            text_add(text, "  %6d -> %-6d %lld bytes%s\n", (int)sender->rank, (int)to,
                     (long long)sender->nbytes, sender->rank == to ? ", kept" : "");
        *any = true;
    }
    senders->n = 0;
}

/* Writes the bytes that each pair of ranks exchanges. Pieces come in the order of receivers. */
static rsd_status explain_pairs(const rsd_plan *plan, struct text *text, bool json)
{
    struct rank_list senders = {0};
    rsd_cursor *cursor;
    const rsd_piece *piece;
    int32_t to = -1;
    bool any = false;
    TRY(rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        if (piece->to != to)
            write_pairs(text, &senders, to, json, &any);
        to = piece->to;
        status = rank_list_add(&senders, piece->from, piece->nbytes);
        if (status)
            break;
    }
    write_pairs(text, &senders, to, json, &any);
    mem_free(senders.list);
    rsd_cursor_free(cursor);
    return status;
}

/* ---- ranks ---- */

/* Writes the totals of one rank. */
static void explain_rank(struct text *text, int32_t rank, const rsd_rank_totals *t, bool json,
                         bool first)
{
    if (json)
        text_add(text,
                 "%s{\"rank\": %d, \"sent\": %lld, \"received\": %lld, \"kept\": %lld, "
                 "\"messages_sent\": %lld, \"messages_received\": %lld, \"memory\": %lld}",
                 first ? "" : ", ", (int)rank, (long long)t->nbytes_sent,
                 (long long)t->nbytes_received, (long long)t->nbytes_kept,
                 (long long)t->nmessages_sent, (long long)t->nmessages_received,
                 (long long)(t->nbytes_src + t->nbytes_dst));
    else
        text_add(text, "  rank %-6d sends %lld, receives %lld, keeps %lld, holds %lld bytes\n",
                 (int)rank, (long long)t->nbytes_sent, (long long)t->nbytes_received,
                 (long long)t->nbytes_kept, (long long)(t->nbytes_src + t->nbytes_dst));
}

/* Returns the rank of an array, or INT64_MAX after the last. */
static int64_t array_rank_or_end(const rsd_layout *layout, int64_t array)
{
    return array < rsd_layout_narrays(layout) ? layout_array_rank(layout, array) : INT64_MAX;
}

/* Writes the totals of every rank that has an array, in ascending order. */
static rsd_status explain_ranks(const rsd_plan *plan, struct text *text, bool json)
{
    int64_t src = 0, dst = 0, rank;
    bool first = true;
    while ((rank = min_i64(array_rank_or_end(plan->src, src), array_rank_or_end(plan->dst, dst))) <
               INT64_MAX &&
           !text->failed) {
        rsd_rank_totals totals = {.struct_nbytes = sizeof totals};
        TRY(rsd_plan_rank_totals(plan, (int32_t)rank, &totals));
        explain_rank(text, (int32_t)rank, &totals, json, first);
        first = false;
        while (array_rank_or_end(plan->src, src) == rank)
            src++;
        while (array_rank_or_end(plan->dst, dst) == rank)
            dst++;
    }
    return RSD_OK;
}

/* ---- plans ---- */

/* Writes a plan as JSON, with the parts that the flags ask for. */
static rsd_status explain_json(const rsd_plan *plan, int32_t flags, const rsd_totals *t,
                               const char *problem, struct text *text)
{
    char digest[RSD_DIGEST_NCHARS];
    rsd_plan_digest(plan, digest);
    text_add(text, "{\"problem\": \"%s\", \"dtype\": \"%s\", \"shape\": [", problem,
             rsd_dtype_name(plan->src->dtype));
    for (int32_t d = 0; d < plan->src->ndim; d++)
        text_add(text, "%s%lld", d ? ", " : "", (long long)plan->src->shape[d]);
    text_add(text, "]");
    if (plan->src->dtype != plan->dst->dtype)
        text_add(text, ", \"dst_dtype\": \"%s\"", rsd_dtype_name(plan->dst->dtype));
    text_add(text,
             ", \"pieces\": %lld, \"messages\": %lld, \"stages\": %lld, \"digest\": \"%s\", "
             "\"bytes\": {\"total\": %lld, \"kept\": %lld, \"moved\": %lld, \"lower_bound\": %lld",
             (long long)t->npieces, (long long)t->nmessages, (long long)t->nstages, digest,
             (long long)t->nbytes_total, (long long)t->nbytes_kept, (long long)t->nbytes_moved,
             (long long)t->nbytes_least);
    if (plan->node_of) {
        text_add(text, ", \"crossed\": %lld", (long long)t->nbytes_crossed);
        if (t->nbytes_crossed_least >= 0)
            text_add(text, ", \"crossed_bound\": %lld", (long long)t->nbytes_crossed_least);
    }
    text_add(text, "}");
    if (flags & RSD_EXPLAIN_RANKS) {
        text_add(text, ", \"ranks\": [");
        TRY(explain_ranks(plan, text, true));
        text_add(text, "]");
    }
    if (flags & RSD_EXPLAIN_PAIRS) {
        text_add(text, ", \"pairs\": [");
        TRY(explain_pairs(plan, text, true));
        text_add(text, "]");
    }
    text_add(text, "}");
    return RSD_OK;
}

static void add_size_line(struct text *text, const char *word, int64_t nbytes, const char *rest)
{
    text_add(text, "%-9s", word);
    add_size(text, nbytes);
    text_add(text, "%s", rest);
}

static void add_least_line(struct text *text, int64_t least, int64_t done)
{
    add_size_line(text, "least", least, " for any plan");
    if (least > 0)
        text_add(text, "; this plan is at %.3f times that", (double)done / (double)least);
    text_add(text, "\n");
}

/* Writes a plan as text, with the parts that the flags ask for. */
static rsd_status explain_text(const rsd_plan *plan, int32_t flags, const rsd_totals *t,
                               const char *problem, struct text *text)
{
    char digest[RSD_DIGEST_NCHARS];
    rsd_plan_digest(plan, digest);
    text_add(text, "%s\n", problem);
    if (plan->src->dtype != plan->dst->dtype)
        text_add(text, "cast     %s to %s\n", rsd_dtype_name(plan->src->dtype),
                 rsd_dtype_name(plan->dst->dtype));
    add_size_line(text, "total", t->nbytes_total, " in all destination arrays\n");
    add_size_line(text, "kept", t->nbytes_kept, " stays on its rank\n");
    add_size_line(text, "moved", t->nbytes_moved, "");
    text_add(text, " in %lld messages; %lld pieces, %lld stage%s\n", (long long)t->nmessages,
             (long long)t->npieces, (long long)t->nstages, t->nstages == 1 ? "" : "s");
    add_least_line(text, t->nbytes_least, t->nbytes_moved);
    if (plan->node_of) {
        add_size_line(text, "crossed", t->nbytes_crossed, " between nodes\n");
        if (t->nbytes_crossed_least >= 0)
            add_least_line(text, t->nbytes_crossed_least, t->nbytes_crossed);
    }
    text_add(text, "digest   %s\n", digest);
    if (flags & RSD_EXPLAIN_RANKS)
        TRY(explain_ranks(plan, text, false));
    if (flags & RSD_EXPLAIN_PAIRS)
        TRY(explain_pairs(plan, text, false));
    return RSD_OK;
}

rsd_status rsd_plan_explain(const rsd_plan *plan, int32_t flags, char **out)
{
    if (flags & ~(RSD_EXPLAIN_JSON | RSD_EXPLAIN_PAIRS | RSD_EXPLAIN_RANKS))
        return fail(RSD_EINVAL, "unknown flags 0x%x", (unsigned)flags);
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    TRY(rsd_plan_totals(plan, &totals));
    char *problem;
    TRY(rsd_problem_print(plan->src, plan->dst, &problem));
    struct text text = {0};
    rsd_status status = flags & RSD_EXPLAIN_JSON
                            ? explain_json(plan, flags, &totals, problem, &text)
                            : explain_text(plan, flags, &totals, problem, &text);
    mem_free(problem);
    if (!status)
        return text_take(&text, out);
    text_drop(&text);
    return status;
}
